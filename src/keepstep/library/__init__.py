"""keepstep as a library: what `import keepstep` offers to scripts and notebooks."""

"""One parametrised decoder; families are presets."""

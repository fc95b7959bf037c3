"""What your own code can follow of a run: derive from Callback and override what you need."""

from collections.abc import Mapping


class Callback:
    """Called on rank 0. Its state is saved with each checkpoint and restored on resume; every method may stay empty."""

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Follow a finished step: its loss, learning rate and times."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Follow an evaluation: its loss and perplexity."""

    def on_save(self, step: int, path: str) -> None:
        """Follow a checkpoint that is complete on disk; `path` is its folder or address."""

    def on_fault(self, step: int, message: str) -> None:
        """Follow a fault: a step that is rolled back or skipped, an error that ends the process, or a restart."""

    def state_dict(self) -> dict[str, object]:
        """Return what the checkpoint keeps: values that JSON can hold."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from what `state_dict` returned at the step that is restored."""

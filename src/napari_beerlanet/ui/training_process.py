"""Training in a process of its own, which the viewer follows but does not hold."""

from __future__ import annotations

import psutil

from napari_beerlanet.core.runs import Run, State, look_at
from napari_beerlanet.ui.followed_process import End, FollowedProcess
from napari_beerlanet.ui.training_launch import launch, lower_priority
from napari_beerlanet.ui.training_words import why_it_ended

__all__ = ["End", "TrainingProcess"]


class TrainingProcess(FollowedProcess):
    """The run of a folder with a run.json."""

    def attach(self, run: Run | None = None) -> bool:
        """Follow a run that goes on in whatever process; False where it does not."""
        run = run or look_at(self.folder)
        if not run.goes_on or run.process is None:
            return False
        return self.attach_to(run.process, run.state is State.PAUSED)

    def _launch(self) -> psutil.Process:
        process = psutil.Process(launch(self.folder, self.environment).pid)
        lower_priority(process)
        return process

    def _written(self) -> End | None:
        run = look_at(self.folder)
        over = run.state in (State.FINISHED, State.STOPPED, State.FAILED)
        return End(run.state, run.message) if over else None

    def _why(self, code: int | None = None, error: BaseException | None = None) -> str:
        return why_it_ended(self.folder, code, error)

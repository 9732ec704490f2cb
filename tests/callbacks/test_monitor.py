# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""ReplayMonitor: it tells, and changes nothing."""

import copy
import csv
import pickle
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_replay import Reason, ReplayMonitor, ReplayStrategy
from tests.demo.examples import load_example
from tests.parity.harness import WARM_UP, Learner, batches, classify, loader, mlp, run_both, script, tape

pytestmark = [pytest.mark.matrix, pytest.mark.filterwarnings("ignore")]

STEPS = 12
NATIVE = 3
"""Steps that are left to Lightning by default."""
PAUSE = 0.3


def logging_step(module: Any, batch: Any, batch_idx: int) -> Tensor:
    loss = classify(module, batch, batch_idx)
    module.log("loss", loss, on_step=True, on_epoch=True)
    return loss


def fit(
    strategy: Any = "auto", callbacks: Any = (), steps: int = STEPS, checkpoint: str | None = None, **options: Any
) -> Trainer:
    """Trains a small network that logs its loss."""
    seed_everything(1, verbose=False)
    trainer = Trainer(
        strategy=strategy,
        callbacks=list(callbacks),
        **{
            "accelerator": "cpu",
            "devices": 1,
            "max_epochs": 1,
            "logger": False,
            "log_every_n_steps": 3,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            **options,
        },
    )
    trainer.fit(Learner(mlp(), logging_step), *loader(batches(), steps), ckpt_path=checkpoint)
    return trainer


def rows(logger: CSVLogger) -> list[dict[str, str]]:
    """Returns what a logger wrote, without what it left empty."""
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


def counts(logger: CSVLogger) -> dict[int, tuple[int, int, int]]:
    """Returns steps replayed, native steps and recordings, by optimizer step."""
    names = ("replay/steps_replayed", "replay/steps_native", "replay/recordings")
    found = {}
    for row in rows(logger):
        if names[0] in row:
            step = int(row["step"])
            assert step not in found
            found[step] = tuple(int(float(row[name])) for name in names)
    return found


# -- it changes nothing -----------------------------------------------------------------------------------------------


def test_training_with_the_monitor_is_bitwise_native() -> None:
    def callbacks() -> list[Callback]:
        return [ReplayMonitor(log_every_n_steps=1)]

    _, replay = run_both(lambda: Learner(mlp(), logging_step), callbacks=callbacks, steps=STEPS)

    assert replay.trace is not None
    assert replay.trace.actions == ["native"] * NATIVE + script(STEPS - NATIVE)


def test_what_the_module_logs_stays_what_it_was(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path, name) for name in ("native", "replay")]
    native = fit(logger=loggers[0], max_epochs=2)
    replay = fit(tape(), [ReplayMonitor()], logger=loggers[1], max_epochs=2)

    written = [row for row in rows(loggers[1]) if not any(name.startswith("replay/") for name in row)]
    assert written == rows(loggers[0])
    assert len(written) > 4
    assert replay.callback_metrics == native.callback_metrics
    assert replay.logged_metrics == native.logged_metrics
    assert replay.strategy.report().steps_replayed > STEPS


class NoOperation(TorchDispatchMode):
    """Refuses whatever torch is asked to do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called")


def refusing_operations(hook: Any) -> Any:
    def guarded(*args: Any, **kwargs: Any) -> Any:
        with NoOperation():
            return hook(*args, **kwargs)

    return guarded


def test_measuring_runs_no_operation_of_torch(tmp_path: Path) -> None:
    monitor = ReplayMonitor(log_every_n_steps=1)
    hooks = [name for name in vars(ReplayMonitor) if name.startswith("on_")]
    for name in hooks:
        setattr(monitor, name, refusing_operations(getattr(monitor, name)))
    strategy = tape()

    fit(strategy, [monitor], logger=CSVLogger(tmp_path))

    assert len(hooks) == 10
    assert strategy.report().recordings[0].replay_ms is not None


# -- loggers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("every", "trainers", "expected"),
    [(None, 5, [5, 10, 12]), (4, 5, [4, 8, 12]), (None, 0, [12]), (100, 1, [12])],
    ids=["as-trainer", "own", "never", "seldom"],
)
def test_counts_go_to_the_logger(tmp_path: Path, every: int | None, trainers: int, expected: list[int]) -> None:
    logger = CSVLogger(tmp_path)

    fit(tape(), [ReplayMonitor(every)], logger=logger, log_every_n_steps=trainers)

    native = NATIVE + WARM_UP + 1
    assert counts(logger) == {
        step: (max(step - native, 0), min(step, native), int(step >= native)) for step in expected
    }


def test_accumulated_batches_are_logged_once(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)

    fit(tape(), [ReplayMonitor(2)], logger=logger, accumulate_grad_batches=3)

    assert counts(logger) == {2: (0, 6, 1), 4: (6, 6, 1)}


def test_every_logger_gets_the_counts(tmp_path: Path) -> None:
    loggers = [CSVLogger(tmp_path, name) for name in "ab"]

    fit(tape(), [ReplayMonitor(6)], logger=loggers)

    assert [list(counts(logger)) for logger in loggers] == [[6, 12], [6, 12]]


def test_a_second_fit_goes_on_counting(tmp_path: Path) -> None:
    monitor, strategy = ReplayMonitor(6), tape()
    loggers: list[Logger] = []
    for name in "ab":
        loggers.append(CSVLogger(tmp_path, name))
        fit(strategy, [monitor], logger=loggers[-1])

    assert [counts(logger) for logger in loggers] == [{6: (0, 6, 1), 12: (6, 6, 1)}, {6: (6, 12, 2), 12: (12, 12, 2)}]
    assert all(recording.replay_ms for recording in strategy.report().recordings)


def test_a_fit_that_resumes_is_logged_at_the_same_distances(tmp_path: Path) -> None:
    file, logger = str(tmp_path / "half.ckpt"), CSVLogger(tmp_path)
    fit(tape()).save_checkpoint(file)

    fit(tape(), [ReplayMonitor(5)], checkpoint=file, logger=logger, max_epochs=2)

    assert list(counts(logger)) == [STEPS + 5, STEPS + 10, 2 * STEPS]


# -- the progress bar -------------------------------------------------------------------------------------------------


class Bar(ProgressBar):
    """Somebody's own, which keeps what it is to print."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def disable(self) -> None: ...

    def print(self, text: str) -> None:
        self.said.append(text)
        strategy = self.trainer.strategy
        self.said.append(f"{len(strategy.recordings)} recordings yet, {strategy.report().steps_total} steps")


class BrokenBar(Bar):
    def print(self) -> None:  # type: ignore[override]
        raise AssertionError("not like this")


def test_a_recording_is_announced_before_it_is_made() -> None:
    bar = Bar()

    fit(tape(), [ReplayMonitor(), bar], enable_progress_bar=True)

    assert bar.said == [
        f"ReplayMonitor: step {NATIVE + WARM_UP} is being recorded, which takes a moment.",
        f"0 recordings yet, {NATIVE + WARM_UP + 1} steps",
    ]


@pytest.mark.parametrize("make", [TQDMProgressBar, RichProgressBar])
def test_announced_in_bars_of_lightning(make: Any, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        fit(callbacks=[make()], enable_progress_bar=True)
    except IndexError:
        pytest.skip("this Lightning's progress bar does not work with the installed rich")

    fit(tape(), [ReplayMonitor(), make()], enable_progress_bar=True)

    assert capfd.readouterr().out.count("is being recorded") == 1


@pytest.mark.parametrize("callbacks", [[BrokenBar()], []], ids=["broken", "none"])
def test_a_broken_bar_or_none_ends_no_training(callbacks: list[Callback], capfd: pytest.CaptureFixture[str]) -> None:
    strategy = tape()

    fit(strategy, [ReplayMonitor(), *callbacks], enable_progress_bar=bool(callbacks))

    assert strategy.report().steps_replayed == STEPS - NATIVE - WARM_UP - 1
    assert "is being recorded" not in capfd.readouterr().out


# -- the end ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_rich", [True, False])
def test_tables_at_the_end(with_rich: bool, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "60")  # what is no terminal gets the whole width
    if not with_rich:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    strategy = tape()

    fit(strategy, [ReplayMonitor()])

    printed = capsys.readouterr().out
    assert ("│" in printed) is with_rich
    (recording,) = strategy.report().recordings
    for text in (
        "steps: 12 in all, 6 replayed (50%), 6 native",
        recording.signature,
        "pool",
        f"{recording.capture_seconds:.2f} s",
        f"{recording.replay_ms:.2f} ms",
        "timed",
        "warm_up",
        Reason.RECORDING.cause,
    ):
        assert text in printed
    if not with_rich:
        assert printed.strip().endswith(str(strategy.report()))


class Stops(Callback):
    """Raises in one hook: after a batch, or when the fit has ended."""

    def __init__(self, hook: str, error: BaseException) -> None:
        setattr(self, hook, self._stop)
        self._error = error

    def _stop(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step > STEPS - 3:
            raise self._error


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_fit_end"])
@pytest.mark.parametrize("error", [ValueError("it was this"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_tables_once_where_a_fit_ends_with_an_exception(
    hook: str, error: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    strategy = tape()

    with pytest.raises((ValueError, KeyboardInterrupt, SystemExit)) as raised:
        fit(strategy, [ReplayMonitor(), Stops(hook, error)])

    assert raised.value is error or raised.value.__context__ is error
    printed = capsys.readouterr().out
    assert printed.count("steps: ") == printed.count("certified") == printed.count("replayed step ") == 1
    assert strategy.report().recordings[0].replay_ms is not None


def test_tables_that_cannot_be_printed_hide_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        asked.append(True)
        raise RuntimeError("no terminal")

    asked: list[bool] = []
    monkeypatch.setattr("lightning_replay.callbacks.monitor._show", broken)

    with pytest.raises(ValueError, match="it was this"):
        fit(tape(), [ReplayMonitor(), Stops("on_train_batch_end", ValueError("it was this"))])

    assert asked == [True]


def test_an_exception_of_another_stage_prints_no_tables(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(batch: Any, batch_idx: int) -> None:
        raise ValueError("it was this")

    trainer = fit(tape(), [ReplayMonitor()])
    assert "steps: " in capsys.readouterr().out
    trainer.lightning_module.validation_step = broken

    with pytest.raises(ValueError, match="it was this"):
        trainer.validate(trainer.lightning_module, loader(batches(), 2)[0], verbose=False)

    assert "steps: " not in capsys.readouterr().out


class Evaluates(Callback):
    """Makes some steps native that nothing watches."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        pl_module.train(batch_idx not in range(15, 20))


def test_steps_that_are_watched_are_no_native_times() -> None:
    strategy = tape(warmup_steps=10)

    fit(strategy, [ReplayMonitor(native_steps=0)], steps=30)

    report = strategy.report()
    (recording,) = report.recordings
    assert report.reasons == {Reason.WARM_UP: 10, Reason.RECORDING: 1}
    assert recording.replay_ms is not None
    assert recording.native_ms is recording.seconds_saved is report.estimated_seconds_saved is None
    assert "what was saved is unknown" in str(report)


@pytest.mark.parametrize("is_tape", [True, False])
def test_times_are_those_of_the_steps(is_tape: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplayStrategy, "uses_tape", is_tape)
    strategy = tape()

    fit(strategy, [Evaluates(), ReplayMonitor(native_steps=0)], steps=30)

    report = strategy.report()
    (recording,) = report.recordings
    assert report.reasons[Reason.UNRECORDED_MODE] == 5
    assert recording.native_ms is not None
    assert recording.replay_ms is not None
    saved = (recording.native_ms - recording.replay_ms) * recording.replays / 1000
    assert recording.seconds_saved == (None if is_tape else pytest.approx(saved))
    assert report.as_dict()["estimated_seconds_saved"] == report.estimated_seconds_saved == recording.seconds_saved


def test_without_the_monitor_no_times_are_claimed() -> None:
    strategy = tape()

    fit(strategy)

    report = strategy.report()
    assert report.steps_replayed
    assert report.estimated_seconds_saved is None
    assert report.break_even_step is None
    assert "replayed step" not in str(report).replace("replayed steps", "")


class Sleepy(Callback):
    """A validation and an end of epoch that take long."""

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        time.sleep(PAUSE)

    on_train_epoch_end = on_validation_start


def test_validation_and_epochs_are_not_steps() -> None:
    strategy = tape()
    seed_everything(1, verbose=False)
    module = Learner(mlp(), logging_step)
    module.validation_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
    trainer = Trainer(
        strategy=strategy,
        callbacks=[ReplayMonitor(), Sleepy()],
        accelerator="cpu",
        devices=1,
        max_epochs=3,
        val_check_interval=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )

    data, _ = loader(batches(), 4)
    trainer.fit(module, data, loader(batches(), 1)[0])

    (recording,) = strategy.report().recordings
    assert recording.replay_ms is not None
    assert recording.replay_ms < 1000 * PAUSE / 3


# -- nothing to monitor -----------------------------------------------------------------------------------------------


def test_without_the_strategy_there_is_nothing_to_monitor(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monitor, logger = ReplayMonitor(), CSVLogger(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            fit(callbacks=[monitor], logger=logger)

    said = [str(warning.message) for warning in caught if "ReplayMonitor" in str(warning.message)]
    assert said == ["ReplayMonitor has nothing to monitor: the strategy is SingleDeviceStrategy, not ReplayStrategy."]
    assert "calls native for it" not in capsys.readouterr().out
    assert not counts(logger)


def test_other_stages_are_no_business_of_its() -> None:
    trainer = Trainer(
        strategy=tape(), callbacks=[ReplayMonitor()], accelerator="cpu", devices=1, logger=False, barebones=False
    )
    module = Learner(mlp())
    module.validation_step = lambda batch, batch_idx: None  # type: ignore[method-assign]

    trainer.validate(module, loader(batches(), 2)[0], verbose=False)

    assert trainer.strategy.report().steps_total == 0


# -- the object -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "error"), [(-1, ValueError), ("5", TypeError), (True, TypeError)])
@pytest.mark.parametrize(("name", "least"), [("log_every_n_steps", 1), ("native_steps", 0)])
def test_a_wrong_argument_is_named(name: str, least: int, given: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"ReplayMonitor cannot be used with {name}=") as caught:
        ReplayMonitor(**{name: given})

    assert f"an int of at least {least}" in str(caught.value)


def test_none_of_the_steps_between_two_entries_is_too_few() -> None:
    with pytest.raises(ValueError, match="log_every_n_steps=0"):
        ReplayMonitor(0)


def test_copies_work_before_and_after_a_fit(tmp_path: Path) -> None:
    monitor = pickle.loads(pickle.dumps(ReplayMonitor(6)))
    for name in "ab":
        logger = CSVLogger(tmp_path, name)
        fit(tape(), [monitor], logger=logger)
        assert list(counts(logger)) == [6, 12]
        monitor = copy.deepcopy(monitor)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asserts the counts of the stand-in")
def test_the_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, report = load_example("monitor").train(tmp_path, steps=40)

    assert (report.steps_replayed, report.steps_native) == (33, 7)
    assert "replay/steps_replayed" in file.read_text()
    assert "is being recorded" in capsys.readouterr().out
    assert {recording.region for recording in report.recordings} == {"encoder", "decoder"}
    assert all(recording.replay_ms for recording in report.recordings)
    assert report.estimated_seconds_saved is None  # by the tape

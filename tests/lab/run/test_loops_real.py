"""Loops as people write them: a run that was cut ends with the same weights, or says which line to change."""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from labkit import in_image

HERE = Path(__file__).parent
EXACT, INVISIBLE = "exact", "invisible"
WARNED = "warned: "

EXPECTED = {
    # loaders
    "shuffled_loader": EXACT,
    "sequence_of_batches": EXACT,
    "range_of_steps": EXACT,
    "batch_sampler": EXACT,
    "samples_without_batches": EXACT,
    "weighted_sampler": EXACT,
    "sampler_with_epoch": EXACT,
    "two_workers": EXACT,
    "two_persistent_workers": EXACT,
    "persistent_workers_saved_between_passes": EXACT,
    "generator_of_the_loader": EXACT,
    "generator_saved_between_passes": EXACT,
    "generator_in_a_sampler": EXACT,
    "noise_of_global_generators": EXACT,
    "generator_in_the_dataset": EXACT,
    "generator_in_the_dataset_of_workers": WARNED + "the loader's dataset.draw draws random numbers",
    "numpy_generator_in_the_dataset": WARNED + "the loader's dataset.draw draws random numbers",
    "noise_in_workers": INVISIBLE,
    "subclass_that_scales": EXACT,
    "subclass_that_scales_with_persistent_workers": EXACT,
    "subclass_that_reads_ahead": EXACT,
    "subclass_that_drops_batches": "Every2nd makes 2 batches of 4 of its sampler",
    "subclass_with_one_iterator": "MultiEpochs starts a pass without its sampler",
    "subclass_with_one_iterator_and_workers": "MultiEpochs starts a pass without its sampler",
    "sequence_with_its_own_order": EXACT,
    "loader_with_a_state": EXACT,
    "loader_made_for_each_pass": EXACT,
    "stream": "this loader cannot resume at its sample: a DataLoader over the IterableDataset Stream",
    "collate_with_noise": EXACT,
    "wrapper_around_a_loader": "this loader cannot resume at its sample: Wrapper",
    "generator_function": "this loader cannot resume at its sample: generator",
    "distributed_sampler": EXACT,
    # passes
    "broken_off": EXACT,
    "broken_off_and_saved": EXACT,
    "broken_off_while_epochs_remain": EXACT,
    "broken_off_after_each_step": EXACT,
    "broken_off_at_a_number_of_steps": EXACT,
    "broken_off_on_two_ranks": EXACT,
    "broken_off_under_a_progress_bar": EXACT,
    "next_by_hand": EXACT,
    "error_that_is_caught": EXACT,
    "islice_counts_by_itself": INVISIBLE,
    "epochs_from_zero": WARNED + "a pass begins in epoch 1, but the program never read run.epoch",
    "epochs_from_zero_with_set_epoch": "had a sampler with the epoch 1, and this one has 0",
    "random_numbers_before_the_pass": WARNED + "has drawn random numbers between run.restore and",
    "enumerate_counts_by_itself": INVISIBLE,
    "batches_that_are_shuffled_before_the_pass": WARNED + "has drawn random numbers between run.restore and",
    "seed_of_each_epoch": EXACT,
    "random_numbers_in_the_body": EXACT,
    "own_generator_in_the_body": INVISIBLE,
    # several loaders
    "two_loops_without_names": "two loops over run.steps have no name",
    "two_loops_with_names": EXACT,
    "two_loops_with_names_saved_between": EXACT,
    "loop_left_out_by_an_empty_list": EXACT,
    "two_loops_in_another_order": "epoch 1 comes to the loop b, but the loop a is next",
    "function_called_for_two_loaders": "two loops over run.steps have no name",
    "two_loaders_in_one_loop_of_unlike_length": "was over 10 samples, and this loader has 14",
    "two_loaders_in_one_loop_of_one_length": WARNED + "where an epoch has both, name each",
    "loaders_that_alternate": EXACT,
    "two_loops_zipped": "begins while a pass of the loop without a name is under way",
    "pairs_of_samples": EXACT,
    "second_loader_without_the_run": WARNED + "the program reads a DataLoader by itself",
    "longer_dataset_after_the_cut": "was over 14 samples, and this loader has 20",
    # evaluation
    "evaluation_behind_the_pass": EXACT,
    "evaluation_within_the_pass": EXACT,
    "evaluation_by_persistent_workers_in_a_pause": EXACT,
    "evaluation_by_persistent_workers": INVISIBLE,
    "evaluation_over_steps": "an evaluation needs no run.steps",
    "evaluation_over_steps_within_the_pass": "the loop evaluation begins while a pass of the loop",
    # updates
    "accumulation_over_all_steps": EXACT,
    "accumulation_that_ends_with_the_pass": EXACT,
    "accumulation_that_the_run_is_not_told": EXACT,
    "accumulation_that_ends_behind_the_pass": EXACT,
    "two_optimizers_of_unlike_pace": EXACT,
    "update_by_hand": EXACT,
    "update_that_is_left_out": EXACT,
    "scheduler_tracked": EXACT,
    "scheduler_of_epochs": EXACT,
    "scheduler_not_tracked": "a learning rate scheduler that is not tracked: it would start over",
    "scheduler_made_after_the_restore": "a learning rate scheduler that is not tracked: it has started over",
    "scheduler_made_from_the_number_of_steps": EXACT,
    "scheduler_within_a_tracked_object": EXACT,
    "plateau_tracked": EXACT,
    "plateau_not_tracked": "a learning rate scheduler that is not tracked: it would start over",
    "plateau_made_after_the_restore": "a learning rate scheduler that is not tracked: it would start over",
    "chain_of_schedulers": EXACT,
    "second_scheduler_not_tracked": "a learning rate scheduler that is not tracked: it would start over",
    "rate_of_the_number_of_the_step": EXACT,
    "rate_of_an_own_counter": INVISIBLE,
    # what else takes part in updates
    "optimizer_not_tracked": "an optimizer is called that is not tracked (SGD)",
    "optimizer_not_tracked_without_a_state": EXACT,
    "optimizer_within_a_tracked_object": EXACT,
    "optimizer_made_in_each_step": EXACT,
    "optimizer_with_a_closure": EXACT,
    "model_not_tracked": "4 of 4 weights that the optimizer updates are of no tracked object",
    "weight_of_no_model": "1 of 5 weights that the optimizer updates are of no tracked object",
    "weight_of_a_tracked_object": EXACT,
    "scaler_tracked": EXACT,
    "scaler_not_tracked": "the program's GradScaler is not tracked",
    "scaler_that_is_off": EXACT,
    "average_tracked": EXACT,
    "average_not_tracked": "the program's AveragedModel is not tracked",
    "copy_that_is_averaged_by_hand": INVISIBLE,
    "tracked_copy_that_is_averaged_by_hand": EXACT,
    "patience_of_the_programs_own": INVISIBLE,
    "layer_frozen_at_one_step": INVISIBLE,
    # saves
    "save_within_a_step": EXACT,
    "save_at_a_break": EXACT,
    "due_and_save": EXACT,
    "due_between_updates": EXACT,
    "loader_read_without_steps": WARNED + "the program reads a DataLoader by itself",
    "save_before_due": "run.save comes after an optimizer.step() that the run has not counted",
    "save_without_steps": "run.save comes after an optimizer.step() that the run has not counted",
}
"""What becomes of each loop of loop_shapes.py; other texts are those of refusals."""

IN_SOAK = frozenset(
    {
        "sequence_of_batches",
        "batch_sampler",
        "samples_without_batches",
        "weighted_sampler",
        "generator_of_the_loader",
        "generator_saved_between_passes",
        "generator_in_a_sampler",
        "persistent_workers_saved_between_passes",
        "sequence_with_its_own_order",
        "loader_made_for_each_pass",
        "broken_off_and_saved",
        "broken_off_after_each_step",
        "broken_off_at_a_number_of_steps",
        "broken_off_under_a_progress_bar",
        "two_loops_with_names_saved_between",
        "loop_left_out_by_an_empty_list",
        "pairs_of_samples",
        "evaluation_behind_the_pass",
        "accumulation_that_the_run_is_not_told",
        "accumulation_that_ends_behind_the_pass",
        "update_by_hand",
        "update_that_is_left_out",
        "scheduler_of_epochs",
        "scheduler_made_from_the_number_of_steps",
        "scheduler_within_a_tracked_object",
        "chain_of_schedulers",
        "rate_of_the_number_of_the_step",
        "optimizer_within_a_tracked_object",
        "optimizer_made_in_each_step",
        "weight_of_a_tracked_object",
        "scaler_that_is_off",
        "tracked_copy_that_is_averaged_by_hand",
        "due_between_updates",
    }
)
"""Exact loops with a close relative in the list: the soak alone cuts them, at each step."""
CHECKED = tuple(name for name in EXPECTED if name not in IN_SOAK)

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("loop shapes")]
Results = Mapping[str, Mapping[str, Any]]
Cut = tuple[int, str, str]
"""Step, signal, and where the program is."""


def results(standin: str, runs: Path, save_every: int, cuts: list[Cut], *names: str) -> Results:
    here = ("--volume", f"{HERE}:/test:ro", "--volume", f"{runs}:/runs", "--workdir", "/runs")
    done = in_image(
        standin, "python3", "/test/loop_shapes.py", json.dumps([save_every, *cuts]), *names, options=here
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: Results = json.loads((runs / "results.json").read_text())
    return found


@pytest.fixture(scope="module")
def cut_twice(standin: str, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Each loop, killed in its second pass."""
    return results(standin, tmp_path_factory.mktemp("loops"), 5, [(7, "KILL", "step")], *CHECKED)


@pytest.mark.parametrize("name", CHECKED)
def test_loop_is_exact_or_named(cut_twice: Results, name: str) -> None:
    expected, found = EXPECTED[name], cut_twice[name]
    told = found["told"]
    if expected == EXACT:
        assert found["result"] == "exact", told
    elif expected == INVISIBLE or expected.startswith(WARNED):
        assert found["result"] == "differ", "it is exact now: docs/howto/own-loop.md says that it is not"
        assert expected.removeprefix(WARNED) in told or expected == INVISIBLE
        assert ("warning: " in told) == (expected != INVISIBLE), told
    else:
        assert found["result"] == "refused", told
        assert expected in told


def test_every_loop_is_expected() -> None:
    loops = re.findall(r"^@loop\b.*\ndef (\w+)", (HERE / "loop_shapes.py").read_text(), re.MULTILINE)
    assert sorted(loops) == sorted(EXPECTED)
    assert {EXPECTED[name] for name in IN_SOAK} == {EXACT}
    kinds = collections.Counter(
        one.partition(":")[0] if one.startswith((EXACT, INVISIBLE, WARNED)) else "refused"
        for one in EXPECTED.values()
    )
    assert kinds == {"exact": 69, "refused": 27, "warned": 8, "invisible": 9}


@pytest.mark.soak
@pytest.mark.parametrize(
    "cuts",
    [
        [(step, "KILL", "step") for step in range(1, 14)],
        [(step, "TERM", "step") for step in range(1, 14, 2)],
        [
            (step, "KILL", when)
            for step in (2, 3, 4, 6, 7, 8)
            for when in ("behind", "saved", "behind the scheduler")
        ],
    ],
    ids=["killed at each step", "stopped", "killed between passes"],
)
def test_loop_is_exact_wherever_it_is_cut(standin: str, tmp_path: Path, cuts: list[Cut]) -> None:
    exact = [name for name, expected in EXPECTED.items() if expected == EXACT]
    found = results(standin, tmp_path, 2, cuts, *exact)
    assert {name: one["told"] for name, one in found.items() if one["result"] != "exact"} == {}

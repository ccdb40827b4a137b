"""docs/invariants.md from the tests: which invariants of the loop have a test, and which are open.

    python tests/invariants.py            write docs/invariants.md
    python tests/invariants.py --check    exit 1 if the committed page is stale

Tests are found by reading their sources (``@pytest.mark.invariant(n)``), not by importing them.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "invariants.md"

SECTIONS: dict[str, tuple[int, ...]] = {
    "Accounting": (1, 2, 3, 4, 5, 6),
    "Versions and staleness": (7, 8, 9, 10, 11, 12, 13, 14, 15, 16),
    "Liveness": (17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28),
    "Weight transfer": (29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39),
    "Generation": (40, 41, 42, 43, 44),
    "Objective": (45, 46, 47, 48, 49, 50, 51, 52),
    "Fairness of data": (53, 54, 55),
    "Evaluation": (56, 57),
    "Resume": (58, 59, 60, 61, 62, 63),
    "Resources": (64, 65, 66),
}

_TEXT = """
1 A dispatched sample ends exactly once: with its result, or in one cancellation record, never in both.
2 The counters of samples add up at every moment: what was dispatched either runs or has one fate.
3 Every permit taken is given back whatever happens; the number out stays between zero and the cap.
4 A cancellation takes tasks and permits in one go before it waits for anything; a race has one outcome.
5 Cancelled samples are not errors, and each sample is counted in one window of the metrics only.
6 A group is complete when its arrived and its ended members together reach its size, and not before.
7 The version number counts committed updates: it only grows, once per publish, however many pieces
   travel.
8 A receiver takes no version that is not newer than its own, unless a new lineage says so.
9 Tokens, log-probs, versions and mask of a trajectory have one length, also after interruptions.
10 Along a trajectory the versions never decrease.
11 When it is shipped, no sample is older than the bound; the time it waited in the queue counts.
12 With bound 0 samples, batches and gradients are those of a synchronous loop, bit for bit.
13 The capacity inequality survives filters, drops, retries, resumes and a lagging engine.
14 Shipping leads training by at most the configured number of steps; a publish always reopens the gate.
15 Staleness is its in-flight part plus its in-queue part; all ways of measuring agree for one version.
16 Another publish cadence changes staleness only as counted in optimizer updates.
17 A group that is open can always finish, whatever the admission gate says meanwhile.
18 Every wait has a deadline or a check of its peer, and running out of time is an error with a name.
19 The death of any component reaches the main loop and ends the run, non-zero, within a bound.
20 Nothing blocks the event loop and no lock is held over an unbounded wait; the loop's lag is measured.
21 Who waits for a condition tests it again on waking; a change before the wait is not lost.
22 A full queue never stops the one who has to empty it, at shutdown neither.
23 The end of the data reaches everyone; a short last batch has a rule; epochs go round.
24 A prompt that always fails is given up after its retries and replaced; too many in a row end the run.
25 A rollout that never ends costs no more than its timeout, and its permits return.
26 Idle means: nothing in flight, queued, partly issued or waiting to be evaluated.
27 While the run drains, evaluation still finishes; that of the last step is never lost.
28 Shutdown is bounded and leaves no task, socket or shared memory behind.
29 Every send has its receive: at the start, in steady state, on resume, for the last and skipped
   versions.
30 Senders begin a collective only when receivers are ready; all ranks issue them in one order.
31 No forward pass mixes tensors of two versions.
32 After a failed or partial transfer the old version serves in full, or the engine refuses to serve.
33 Engines go on after any outcome of an update; pause and resume may be repeated.
34 What carries a version is not removed before every consumer has confirmed it.
35 Publishing a version's label alone aborts nothing.
36 After an update the greedy output is that of an engine freshly loaded with the same weights.
37 Cached state of one version is never used for a request of another.
38 Stale work is dropped before engines are asked to pause, never during the transfer.
39 Deltas add up to the full weights bit for bit; gaps, repeats and wrong bases are found and repaired.
40 An interrupted and resumed generation with unchanged weights gives the same tokens and log-probs.
41 A resumed request may sample only what is left of its budget.
42 The tokens trained are the ids sampled; environment tokens are masked; shared prefixes count once.
43 Temperature, top-k and top-p mean the same on both sides; equal weights give ratio 1.
44 Replayed router choices stay aligned with their tokens through resume, padding and packing.
45 Correction weights carry no gradient; at ratio 1 every correction is the plain gradient.
46 The loss denominator is global and taken before masks; split, packing and ranks don't change the
   result.
47 Extreme or non-finite log-ratios give no NaN and no silently large weight; they are counted.
48 Group statistics go by group, over survivors, independent of order; a lone survivor gets zero.
49 Neither padding nor failed episodes get a gradient; no data-parallel rank gets an empty row.
50 The geometric mask decides independently of length when the ratio per token is constant.
51 The effective sample size is 1 for equal weights and 1/n for a dominating one, before truncation.
52 Asynchronous training without a stated correction is a config error.
53 Trained lengths are distributed as sampled ones under pacing; within the bound the oldest go first.
54 Prompts slower than the bound are trained at their rate, or their losses are reported.
55 The mix of environments keeps its configured ratios after cancellations and filters.
56 An evaluation belongs to one version; it is never stale and touches no training state.
57 Evaluation keeps to its share of the permits and fires once per trigger, also over a resume.
58 Stopping and resuming trains the prompts that one run would have trained: none twice, none skipped.
59 The data cursor follows what was consumed, with everything needed to go on from it.
60 Generation starts only once the weights of the restored version are in place.
61 A checkpoint appears whole or not at all; unfinished or later ones are ignored.
62 After a resume the capacity is that of an uninterrupted run.
63 Steps only grow in the metrics over several attempts; rows of each attempt are kept.
64 Buffered bytes are bounded and memory stays flat over a long run.
65 A restarted engine has the current weights before it serves.
66 Unknown config keys are refused; the resolved config is kept; equal seeds give equal schedules.
"""


def _parse(text: str) -> dict[int, str]:
    """Number -> sentence; an entry starts with its number at the margin."""
    entries: dict[int, str] = {}
    for line in text.strip().splitlines():
        number, _, rest = line.partition(" ")
        if number:
            entries[int(number)] = rest
        else:
            last = max(entries)
            entries[last] = f"{entries[last]} {rest.strip()}"
    return entries


INVARIANTS = _parse(_TEXT)

HEADER = """# Invariants

What the asynchronous loop, the transfer, the engine and the objective promise, and the tests that hold them
to it (`@pytest.mark.invariant(n)`). Written by `python tests/invariants.py`, never by hand; a test fails
when this page is stale. *open* means that no test covers the invariant yet.
"""


def covering_tests(root: Path) -> dict[int, list[str]]:
    """Invariant -> ``folder/file.py::test`` of every marked test below ``root``, sorted."""
    found: dict[int, list[str]] = {n: [] for n in INVARIANTS}
    for path in sorted(root.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf8"))
        module_marks = _module_marks(tree)
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
                for number in sorted({*_marks(node.decorator_list), *module_marks}):
                    if number not in found:
                        raise SystemExit(
                            f"{path}: {node.name} marks invariant {number}, expected 1 to {len(found)}"
                        )
                    found[number].append(f"{path.relative_to(root).as_posix()}::{node.name}")
    return found


def render(root: Path) -> str:
    """The page's text."""
    tests = covering_tests(root)
    lines = [HEADER]
    for title, numbers in SECTIONS.items():
        lines.append(f"## {title}\n")
        for number in numbers:
            where = [f"   - `{t}`" for t in tests[number]] or ["   - open"]
            lines += [f"{number}. {INVARIANTS[number]}", *where]
        lines.append("")
    covered = sum(bool(t) for t in tests.values())
    lines.append(f"{covered} of {len(INVARIANTS)} invariants have a test.")
    return "\n".join(lines) + "\n"


def _module_marks(tree: ast.Module) -> list[int]:
    """Numbers in a module's ``pytestmark``."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets
        ):
            value = node.value
            return _marks(value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value])
    return []


def _marks(nodes: list[ast.expr]) -> list[int]:
    """n of every ``pytest.mark.invariant(n, ...)`` among ``nodes``."""
    found = []
    for node in nodes:
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "invariant"
        ):
            found += [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, int)]
    return found


def main(arguments: list[str]) -> int:
    """Write the page, or check it; the exit code."""
    text = render(ROOT / "tests")
    if arguments == ["--check"]:
        return 0 if PAGE.exists() and PAGE.read_text(encoding="utf8") == text else 1
    PAGE.write_text(text, encoding="utf8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

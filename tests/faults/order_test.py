"""B32: all ranks make the same calls in the same order, whatever delays each of them; and if they
didn't, it would be found. Experts, sharding and prefetch are on."""
import collections
import os
import sys

import harness as h

CALL_ORDER = os.path.abspath(sys.argv.pop(2))
STEPS = 60 if h.LONG else 4
CONFIG = """
model {{
  width: 40 vocabulary: 257
  schedule {{ periodic {{ order: "full" order: "sliding" layers: 3 }} }}
  mixer {{ full {{ heads: 4 key_value_heads: 2 head_width: 10 }} }}
  mixer {{ sliding {{ attention {{ heads: 5 key_value_heads: 1 head_width: 8 }} window: 17 }} }}
  feed_forward {{
    experts {{ experts: 25 active: 4 width: 13 shared_width: 21 selection_bias: true }}
  }}
  feed_forward_range {{ first: 1 last: 1 feed_forward {{ width: 53 }} }}
}}
data {{ recipe: "{data}/recipe.textproto" directory: "{data}/shards" document_masking: true }}
train {{ global_batch: 14 micro_batch: 2 steps: {steps} seed: 3 }}
optim {{ learning_rate: 3e-3 warmup_steps: 2 schedule: COSINE }}
validation {{ every: 3 windows: 4 }}
checkpoint {{ every: 2 keep_last: 100 }}
"""
LAYOUTS = [
    (4, ["parallel.expert_ranks=2"]),
    (3, ["parallel.expert_ranks=3", "execution.recompute=true"]),
    (5, ["parallel.accumulate=LOCAL", "parallel.expert_ranks=5"]),
] if h.LONG else [(4, ["parallel.expert_ranks=2"]), (3, ["parallel.expert_ranks=3"])]


def make_config():
    path = h.FOLDER + "/order.textproto"
    h.write(path, CONFIG.format(data=h.make_data(), steps=STEPS))
    return path


def recorded(name, ranks, sets, delay, seed=0):
    """The run's folder, and the calls of its ranks; names of equal length make equal broadcasts."""
    folder = h.new_folder(name)
    calls = h.new_folder(name + "-calls")
    os.makedirs(calls)
    h.train(make_config(), folder, ranks, sets=sets, timeout=1800,
            mpi=["-x", f"LD_PRELOAD={CALL_ORDER}", "-x", f"TESSERA_CALLS_FOLDER={calls}", "-x",
                 f"TESSERA_CALLS_DELAY={delay}", "-x", f"TESSERA_CALLS_SEED={seed}"])
    assert len(os.listdir(calls)) == ranks, os.listdir(calls)
    return folder, [[line.split() for line in open(f"{calls}/{rank}", encoding="utf-8")]
                    for rank in range(ranks)]


def check_same_order(calls):
    """For each communicator: its ranks make the same calls together, what one sends another
    receives in the same order, and transfers begin in order of their tags. Returns how many calls
    of each kind there were."""
    together = collections.defaultdict(dict)  # by communicator, then by its rank
    messages = collections.defaultdict(lambda: collections.defaultdict(list))
    counted = collections.Counter()
    for of_rank in calls:
        place = {}
        tags = collections.defaultdict(list)
        for what, communicator, *rest in of_rank:
            counted[what] += 1
            if what == "member":
                place[communicator] = rest[0]
                together[communicator][rest[0]] = []
            elif what == "all":
                if communicator in place:
                    together[communicator][place[communicator]].append(rest)
            else:
                peer, size, tag = rest
                ends = (place[communicator], peer) if what == "send" else (peer, place[communicator])
                messages[(communicator, *ends)][what].append((size, tag))
                if tag not in tags[communicator][-1:]:
                    tags[communicator].append(tag)
        for communicator, seen in tags.items():
            assert seen == sorted(set(seen), key=int), (communicator, seen)
    for communicator, members in together.items():
        first = members["0"]
        for rank, sequence in members.items():
            for n, (ours, theirs) in enumerate(zip(sequence, first)):
                assert ours == theirs, f"{communicator}, call {n}: rank 0 {theirs}, rank {rank} {ours}"
            assert len(sequence) == len(first), (communicator, rank)
    for ends, ways in messages.items():
        assert ways["send"] == ways["receive"], ends
    return counted


def test_B32_any_delays_leave_orders_and_bits_alone():
    reference = h.new_folder("reference")
    h.train(make_config(), reference, 1)
    for ranks, sets in LAYOUTS:
        folder, undelayed = recorded("run-0", ranks, sets, 0)
        counted = check_same_order(undelayed)
        assert counted["send"] > 100 * STEPS and counted["all"] > 4 * STEPS, counted
        h.assert_same_run(folder, reference)
        for seed in (1, 2) if h.LONG else (1,):
            folder, delayed = recorded(f"run-{seed}", ranks, sets, 5000, seed)
            check_same_order(delayed)
            for rank, (ours, theirs) in enumerate(zip(delayed, undelayed)):
                for n, pair in enumerate(zip(ours, theirs)):
                    assert pair[0] == pair[1], f"rank {rank}, call {n}: delayed and not: {pair}"
                assert len(ours) == len(theirs), rank
            h.assert_same_run(folder, reference)
        print(f"  {ranks} ranks, {sets}: {dict(counted)}")


if __name__ == "__main__":
    h.main(globals())

"""The whole program under the thread sanitizer: a rank with three threads builds data, trains with
experts, validates, saves and resumes. Any report fails the run (libraries.supp says what isn't ours).
"""
import os

import harness as h

EXPERTS = """
model { feed_forward { experts { experts: 5 active: 2 width: 16 shared_width: 24 } } }
"""
os.environ["TSAN_OPTIONS"] = " ".join([
    "exitcode=66", "halt_on_error=0", "second_deadlock_stack=1",
    "suppressions=" + os.path.join(h.SOURCE, "tests", "races", "libraries.supp")])


def test_a_run_and_its_resume():
    folder = h.new_folder("run")
    config = h.make_config(4, extra=EXPERTS)
    h.train(config, folder, 0, sets=["execution.threads=3", "train.stop_at_step=2"], timeout=1800)
    h.train(config, folder, 0, sets=["execution.threads=3"], timeout=1800)
    assert h.steps_in_metrics(folder) == 4


def test_building_and_verifying_data():
    h.run([h.TESSERA, "data", "build", "--recipe", h.make_data() + "/recipe.textproto", "--sources",
           h.make_data() + "/sources", "--out", h.new_folder("built"), "--threads", "3"], timeout=1800)
    h.run([h.TESSERA, "data", "verify", "--data", h.FOLDER + "/built", "--threads", "3"], timeout=1800)


if __name__ == "__main__":
    h.main(globals())

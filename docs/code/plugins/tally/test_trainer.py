from drivetrain_tally import TallyTrainer, all_sum

import drivetrain
from drivetrain_testing import TrainerConformance


def train_func():
    drivetrain.report({"total": all_sum(1.0)})


class TestTallyTrainer(TrainerConformance):
    trainer = TallyTrainer
    name = "tally"

    def arguments(self):
        return {"train_loop_per_worker": train_func}

from drivetrain_testing import PolicyConformance


class TestPatientPolicy(PolicyConformance):
    name = "patient"

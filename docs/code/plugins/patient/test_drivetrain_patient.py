from drivetrain.testing import PolicyConformance


class TestPatientPolicy(PolicyConformance):
    name = "patient"

from drivetrain_testing import RuntimeCapability, RuntimeConformance


class TestSubprocessRuntime(RuntimeConformance):
    runtime = "subprocess"
    capabilities = {
        RuntimeCapability.PROCESSES,
        RuntimeCapability.EXIT_CODES,
        RuntimeCapability.OUTPUT,
        RuntimeCapability.ELASTIC,
        RuntimeCapability.ENDS_WITH_DRIVER,
    }

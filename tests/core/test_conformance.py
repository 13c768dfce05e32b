"""The conformance kit, applied to the backend that does nothing, and the kit's own rules."""

import pytest

from drivetrain.plugin import BackendConfig
from drivetrain_testing import BackendConformance


class TestNoBackend(BackendConformance):
    config = BackendConfig()
    runtimes = ("local",)


def test_a_class_without_config_is_refused():
    with pytest.raises(TypeError, match="expected an attribute `config`"):
        type("TestNothing", (BackendConformance,), {})


def test_overriding_a_standard_test_requires_a_reason():
    def test_ranks_exchange_values(self):
        pass

    with pytest.raises(TypeError, match=r"expected xfail\(reason=\.\.\.\)"):
        type(
            "TestLess",
            (BackendConformance,),
            {"config": BackendConfig(), "test_ranks_exchange_values": test_ranks_exchange_values},
        )
    excused = pytest.mark.xfail(reason="this framework has no collectives")(test_ranks_exchange_values)
    type("TestExcused", (BackendConformance,), {"config": BackendConfig(), "test_ranks_exchange_values": excused})

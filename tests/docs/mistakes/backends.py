import contextlib
import os
import threading

from drivetrain.plugin import Backend, BackendConfig
from tests.docs.mistakes.making import load, mistake, train


class Faulty(Backend):
    name = "faulty"

    def session(self, context, rendezvous):
        return contextlib.nullcontext()


@mistake("`creat()` instead of `create()`")
def misspelled():
    load("backend", "class TallyConfig(BackendConfig):\n    def creat(self): ...\nplugin = TallyConfig")


@mistake("a field of the configuration without a default value")
def required_field():
    load(
        "backend",
        """
        @dataclass(frozen=True)
        class TallyConfig(BackendConfig):
            host: str
            def create(self): ...
        plugin = TallyConfig
        """,
    )


@mistake("a missing `session()`")
def no_session():
    load("backend", "class TallyBackend(Backend): ...\nplugin = TallyBackend")


@mistake("`create()` that returns nothing")
def creates_nothing():
    class TallyConfig(BackendConfig):
        def create(self): ...

    TallyConfig.__qualname__ = "TallyConfig"
    train(backend_config=TallyConfig())


@mistake("`rendezvous()` that returns a single mapping")
def single_mapping():
    class Broken(Faulty):
        def rendezvous(self, group):
            return {"port": "29500"}

    train(num_workers=2, backend_config=Broken())


@mistake("`rendezvous()` that returns too few mappings")
def few_mappings():
    class Broken(Faulty):
        def rendezvous(self, group):
            return [{}]

    train(num_workers=2, backend_config=Broken())


@mistake("a lock in an attribute of the backend")
def lock_in_attribute():
    class TallyBackend(Faulty):
        def __init__(self):
            self.lock = threading.Lock()

    TallyBackend.__qualname__ = "TallyBackend"
    train(num_workers=2, backend_config=TallyBackend())


@mistake("numbers in the mappings of `rendezvous()`")
def numbers_in_mapping():
    class Broken(Faulty):
        def rendezvous(self, group):
            return [{"port": 29500} for _ in group.workers]

    train(num_workers=2, backend_config=Broken())


@mistake("`rendevous()` instead of `rendezvous()`")
def misspelled_method():
    class TallyBackend(Faulty):
        def rendevous(self, group): ...

    TallyBackend.__qualname__ = "TallyBackend"
    train(backend_config=TallyBackend())


@mistake("an exception in `rendezvous()`")
def raises():
    class Broken(Faulty):
        def rendezvous(self, group):
            return {}["MASTER_ADDR"]

    train(num_workers=2, backend_config=Broken())


@mistake("an exception in a function that `rendezvous()` calls on a worker")
def raises_on_worker():
    def find_port():
        if os.environ["RANK"] == "1":
            raise OSError("no free port")

    class Broken(Faulty):
        def rendezvous(self, group):
            return group.run(find_port)

    train(num_workers=2, backend_config=Broken())


@mistake("a `session()` without `contextlib.contextmanager`")
def no_context_manager():
    class Broken(Faulty):
        def session(self, context, rendezvous):
            yield

    train(num_workers=1, backend_config=Broken())


@mistake("numbers as values of environment variables")
def numbers_in_environment():
    class Broken(Faulty):
        environment = {"THREADS": 2}  # noqa: RUF012 - as authors write it

    train(num_workers=2, backend_config=Broken())


@mistake("`callbacks()` that returns names")
def names_of_callbacks():
    class Broken(Faulty):
        def callbacks(self):
            return ["csv"]

    train(num_workers=2, backend_config=Broken())


@mistake("the framework is imported at the top of the module, but not installed")
def framework_not_installed():
    load("backend", "import a_framework")

"""What an error of a rank means: is its process lost, was it the rank's own fault, or only a broken connection.

Guarantees: pure functions of the exception, so that the order of blame (lost processes first, then a rank's own errors
by time, then broken connections) is tested without a cluster.
"""

from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayActorError, RayTaskError

from raycp.errors import RaycpError, WorkerError


def unwrap(error: BaseException) -> BaseException:
    """The worker's own exception out of Ray's wrapper; Ray's error itself for a lost actor."""
    if not isinstance(error, RayTaskError):
        return error
    inner = getattr(error, "cause", None)
    return inner if isinstance(inner, BaseException) else error


def is_lost(error: BaseException) -> bool:
    """Whether the rank's process is gone, silent, stuck or out of reach, or says that its device is of no use."""
    if isinstance(error, WorkerError):
        return bool(error.details.get("unfit"))
    return isinstance(error, RayActorError | TimeoutError | GetTimeoutError)


def weight(error: BaseException) -> tuple[int, float]:
    """Sort key of blame: lost processes first, then a rank's own errors by time, then broken connections."""
    if is_lost(error) and not isinstance(error, ActorUnavailableError):
        return (0, 0.0)
    if isinstance(error, WorkerError):
        return (2 if error.details.get("communication") else 1, float(error.details.get("time", 0.0)))
    return (1, 0.0)


def cause_of(error: BaseException) -> str:
    """One line that says what happened."""
    if isinstance(error, WorkerError):
        return str(error.details.get("cause", error.message))
    if isinstance(error, RaycpError):
        return f"{type(error).__name__}: {error.message}"
    if isinstance(error, ActorDiedError):
        text = str(error).split("Some common causes")[0]  # a list of everything that there is
        kind = "its node has died" if "node" in text and "died" in text.split("node")[-1][:40] else "its process died"
        reasons = [w for w in ("OutOfMemory", "SIGKILL", "SIGSEGV", "SIGTERM", "SIGABRT") if w in text]
        return f"{kind}{' (' + ', '.join(reasons) + ')' if reasons else ''}{_exit(text)}"
    return f"{type(error).__name__}: {_first_lines(str(error))}"


def default_fix(error: BaseException) -> str:
    """What to do about an error that brings no fix of its own."""
    if isinstance(error, TimeoutError):
        return "look at that machine (is it swapping or stopped?); run the same command again to continue"
    if isinstance(error, RayActorError):
        return "look for the reason in the node's log (out of memory?); run the same command again to continue"
    return "run the same command again to continue from the last checkpoint"


def _exit(text: str) -> str:
    """What Ray says about the end of a process, without the actor's address card."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = [line for line in lines if "exit" in line.lower() or "oom" in line.lower() or "memory" in line.lower()]
    return f": {' '.join(told)[:400]}" if told else ""


def _first_lines(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[:2] + [line for line in lines[2:] if "exit" in line.lower() or "oom" in line.lower()])[:600]

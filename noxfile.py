"""Development sessions: ``nox`` runs lint, types and tests; ``nox -l`` lists all of them.

Each session makes its own environment and installs all that it needs.
"""

from pathlib import Path

import nox

nox.options.sessions = ["lint", "types", "tests"]
nox.options.default_venv_backend = "venv"

CORE = "linnet_core"
PLUGINS = [
    "plugins/linnet_torch",
    "plugins/linnet_jax",
    "plugins/linnet_onnx",
    "plugins/linnet_gguf",
    "plugins/linnet_hf",
]
PACKAGES = [CORE, *PLUGINS]
SOURCES = [f"{package}/src" for package in PACKAGES]

# The default wheel of later releases brings gigabytes of CUDA; this one is what we test with.
TORCH = "torch==2.13.0"
ORT = "onnxruntime==1.32.0"
RUFF = "ruff==0.17.6"
TESTING = ["pytest>=8", "hypothesis>=6.100", "safetensors>=0.5", RUFF]


def install(session: nox.Session, *packages: str, editable: bool = False) -> None:
    """Install our packages together, so that they find each other and not an index's."""
    flags = [
        flag for package in packages for flag in (["-e"] if editable else []) + [f"./{package}"]
    ]
    # Which ONNX Runtime, for CPUs or for GPUs, is the user's choice: no package depends on one.
    session.install(TORCH, *[ORT] * ("plugins/linnet_onnx" in packages), *flags)


@nox.session
def demo(session: nox.Session) -> None:
    """A real model answers a prompt: fetches 93 MB on the first run."""
    install(session, CORE, "plugins/linnet_torch", "plugins/linnet_gguf")
    prompt = session.posargs or ["What is the capital of France?"]
    session.run("linnet", "run", "smollm2-135m-instruct", *prompt)


@nox.session
def tests(session: nox.Session) -> None:
    """The default suite, on a CPU: under 20 minutes on two cores."""
    install(session, *PACKAGES)
    session.install(*TESTING)
    session.run("pytest", "-m", "not slow", *session.posargs)


@nox.session
def slow(session: nox.Session) -> None:
    """What takes minutes, gigabytes or a peer engine."""
    install(session, *PACKAGES)
    session.install(*TESTING, "accelerate")  # Transformers asks for it to read GGUF
    session.run("pytest", "-m", "slow", *session.posargs)


def peer(session: nox.Session, *names: str) -> None:
    """Set up the environments of peers in the cache folder, and run the tests that need them."""
    install(session, *PACKAGES)
    session.install(*TESTING)
    for name in names:
        session.run("linnet", "bench", "setup", name)
    for name in names:
        session.run("pytest", "-m", "slow", "-k", f"test_a_peer and {name}", *session.posargs)


@nox.session(name="peers-llamacpp", default=False)
def peers_llamacpp(session: nox.Session) -> None:
    """llama.cpp is measured, and agrees with the reference."""
    peer(session, "llamacpp")


@nox.session(name="peers-vllm", default=False)
def peers_vllm(session: nox.Session) -> None:
    """vLLM is measured on a checkpoint and on Linnet's export; gigabytes."""
    peer(session, "vllm")


@nox.session(name="peers-sglang", default=False)
def peers_sglang(session: nox.Session) -> None:
    """SGLang is driven, and computes every family's export; on the processor, 11 GB."""
    install(session, *PACKAGES)
    session.install(*TESTING)
    session.run("linnet", "bench", "setup", "sglang")
    session.run("pytest", "-m", "slow", "-k", "sglang", *session.posargs)


@nox.session(name="peers-keras", default=False)
def peers_keras(session: nox.Session) -> None:
    """KerasHub is measured, and agrees with the reference."""
    peer(session, "kerashub")


@nox.session(name="peers-onnx", default=False)
def peers_onnx(session: nox.Session) -> None:
    """optimum-onnx and ONNX Runtime GenAI are measured."""
    peer(session, "optimum-onnx", "ort-genai")


@nox.session(default=False)
def page(session: nox.Session) -> None:
    """The benchmark page in a browser; needs Chromium (apt-get install chromium)."""
    install(session, CORE)
    session.install(*TESTING, "playwright==1.65.2", "axe-playwright-python==0.1.8")
    session.run("pytest", "tests/test_page_browser.py", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff: rules and formatting."""
    session.install(RUFF)
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Mypy, strict, over our packages."""
    install(session, *PACKAGES, editable=True)
    session.install("mypy==2.4.1", *TESTING)
    session.run("mypy", *SOURCES)


@nox.session
def docs(session: nox.Session) -> None:
    """The documents' links lead somewhere, and their code runs."""
    install(session, *PACKAGES)
    session.install(*TESTING)
    documents = [str(path) for path in Path("docs").glob("*.md")]
    session.log(f"checking README.md and {len(documents)} documents")
    session.run("pytest", "tests/test_documents.py", *session.posargs)

"""Configuration of Sphinx. A build downloads nothing, unless it has the tag ``online`` (``sphinx -t online``)."""

import ast
import importlib
import inspect
import pkgutil
import re

import drivetrain
import drivetrain_console
import drivetrain_data
import drivetrain_gbdt
import drivetrain_hf
import drivetrain_horovod
import drivetrain_interactive
import drivetrain_jax
import drivetrain_launch
import drivetrain_lightning
import drivetrain_ray
import drivetrain_tf
import drivetrain_torch
import drivetrain_track
import drivetrain_tune

project = "drivetrain"
author = "The drivetrain authors"
copyright = "The drivetrain authors"
release = version = drivetrain.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinxext.opengraph",
]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
python_maximum_signature_line_length = 80
python_display_short_literal_types = True
# Attributes are listed like parameters, with names, types and descriptions, and not as separate entries.
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_numpy_docstring = False

if tags.has("online"):  # noqa: F821  # Sphinx defines it
    extensions.append("sphinx.ext.intersphinx")
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", None),
    "torch": ("https://docs.pytorch.org/docs/stable", None),
    "numpy": ("https://numpy.org/doc/stable", None),
    "pyarrow": ("https://arrow.apache.org/docs", None),
    "ray": ("https://docs.ray.io/en/latest", None),
}

copybutton_exclude = ".linenos, .gp, .go"
ogp_site_name = project
ogp_social_cards = {"enable": False}  # they would need matplotlib
ogp_description_length = 160

html_theme = "furo"
html_logo = "_static/logo.svg"
html_favicon = "_static/favicon.svg"
html_theme_options = {"sidebar_hide_name": True, "top_of_page_buttons": []}
html_title = f"drivetrain {release}"
html_static_path = ["_static"]
html_css_files = ["drivetrain.css"]
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"


def _load_names_for_annotations() -> None:
    """Execute the ``if TYPE_CHECKING:`` block of each module, so that annotations can be resolved and linked."""
    for package in (
        drivetrain,
        drivetrain_console,
        drivetrain_launch,
        drivetrain_interactive,
        drivetrain_ray,
        drivetrain_data,
        drivetrain_gbdt,
        drivetrain_track,
        drivetrain_tune,
        drivetrain_torch,
        drivetrain_lightning,
        drivetrain_hf,
        drivetrain_tf,
        drivetrain_horovod,
        drivetrain_jax,
    ):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if info.name.endswith("._warmup"):  # has side effects that are meant for workers
                continue
            module = importlib.import_module(info.name)
            for node in ast.parse(inspect.getsource(module)).body:
                if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                    block = ast.Module(node.body, type_ignores=[])
                    exec(compile(block, module.__file__ or info.name, "exec"), vars(module))


def _clean_signature(app, what, name, obj, options, signature, returns):
    """Replace default factories by text that Sphinx can parse, and omit arguments of protocols and private ones."""
    if signature == "(*args, **kwargs)" and getattr(obj, "_is_protocol", False):
        return "", returns
    if signature and "<factory>" in signature:
        return re.sub(r", _\w+: [^=]* = \.\.\.(?=[,)])", "", signature.replace("<factory>", "...")), returns
    return None


_property_lines = {}


def _before_napoleon(app, what, name, obj, options, lines):
    if what == "property":
        _property_lines[name] = list(lines)


def _after_napoleon(app, what, name, obj, options, lines):
    """Restore the docstrings of properties: napoleon takes words before a colon in the first line for a type."""
    if what == "property":
        lines[:] = _property_lines.pop(name)


def setup(app):
    _load_names_for_annotations()
    app.connect("autodoc-process-signature", _clean_signature)
    app.connect("autodoc-process-docstring", _before_napoleon, priority=100)
    app.connect("autodoc-process-docstring", _after_napoleon, priority=900)

"""Which pages the site has. Each file lies where it lies in the repository, so links between them hold."""

import json

from built import ROOT, public_names  # mkdocs loads a hook with its folder on the path
from mkdocs.structure.files import File, InclusionLevel


class Page(File):
    def is_documentation_page(self):
        return self.src_uri.endswith((".md", ".ipynb"))


def on_files(files, config):
    def add(uri, **content):
        source = content or {"abs_src_path": str(ROOT / uri)}
        files.append(Page.generated(config, uri, inclusion=InclusionLevel.INCLUDED, **source))
        return uri

    def found(pattern):
        return [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob(pattern))]

    for uri in [*found("*/pictures/*.png"), "arrowcache/demo.py", "docs/llms.txt"]:
        add(uri)
    config.nav = [
        add("README.md"),
        {"Tutorials": [add(uri, content=markdown(uri)) for uri in found("notebooks/*.ipynb")]},
        {"How to": [add(uri) for uri in found("docs/how-to/*.md")]},
        {"Explanation": [add(uri) for uri in found("docs/explanation/*.md")]},
        {
            "Reference": [add(uri) for uri in found("docs/reference/*.md")]
            + [
                {module: add(f"{module}.md", content=f"::: {module}\n    options: {{members: {names}}}\n")}
                for module, names in public_names().items()
            ]
        },
        {"Project": [add(uri) for uri in found("[!R]*.md") + found("benchmarks/*.md")]},
    ]
    return files


def markdown(notebook):
    cells = json.loads((ROOT / notebook).read_text())["cells"]
    fences = {"markdown": "{}", "code": "```python\n{}\n```"}
    return "\n\n".join(fences[cell["cell_type"]].format("".join(cell["source"])) for cell in cells)

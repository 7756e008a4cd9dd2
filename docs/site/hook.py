"""Hands the site's pages to MkDocs."""

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pages import Site, slug
from reference import MADE_PAGES

ROOT = Path(__file__).parents[2]
_made: dict[str, Site] = {}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    site = _made["site"] = Site(ROOT, config.nav or [], MADE_PAGES)
    left = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")} - site.pages.keys()
    if left:
        raise ValueError(f"mkdocs.yml: nav lacks {min(left)}: name it")
    config.nav = site.nav_of_site()
    anchors: dict[str, Any] = config.mdx_configs.setdefault("toc", {})
    anchors["slugify"] = slug
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    site = _made["site"]
    for name, text in site.linked().items():
        files.append(File.generated(config, name, content=text))
    for path in sorted(site.assets):
        files.append(File.generated(config, f"files/{path}", abs_src_path=str(ROOT / path)))
    return files

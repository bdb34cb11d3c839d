"""`aotc.attach`: compiled code in the place of the components of a pipeline, by their names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from aotc.errors import BindError, Issue, NotFoundError
from aotc.runtime.load import load
from aotc.store.reference import DEFAULT_TAG, is_registry, is_remote, parse_reference, store_of

if TYPE_CHECKING:
    from aotc.runtime.compiled import Compiled


def attach(
    pipe: Any,
    store: str | os.PathLike[str] | None = None,
    *,
    models: Mapping[str, str] | None = None,
    tag: str = DEFAULT_TAG,
    **options: Any,
) -> dict[str, nn.Module]:
    """Put compiled code in the place of each component of a pipeline or model for which there is a model of its name.

    A model called `transformer` takes the place of `pipe.transformer`, one called `text-encoder` or `text_encoder` that
    of `pipe.text_encoder`, one called `decoder.up` that of `pipe.decoder.up`. All are loaded before any takes a place.

    Args:
        pipe: whatever has the modules as attributes: a pipeline of transformers or diffusers, or a module.
        store: the store's folder or URL; else `$AOTC_STORE`, else `aotc-store`. Of a registry the repositories below
            one: with `oci://HOST/TEAM/PIPE`, a component `unet` is looked for in `oci://HOST/TEAM/PIPE/unet`.
        models: instead of all that have a component's name: the reference of the model for each of these components.
        tag: of the models that are found by their names.
        options: for `aotc.load`, of each of them.

    Returns:
        What was replaced, by its path. To undo: `setattr(pipe, path, module)`, and `detach()` of what is there where it
        was built by regions.

    Raises:
        NotFoundError: no model has the name of a component; both sides are listed. BindError: `models` names something
        that is not a module. The errors of `aotc.load`: then nothing was replaced.

    Example:
        >>> service = torch.nn.ModuleDict({"quickstart": module, "head": torch.nn.Linear(256, 8)})
        >>> replaced = aotc.attach(service, "aotc-store")
        >>> replaced["quickstart"] is module, service["quickstart"]
        (True, <aotc.Compiled quickstart for ...>)
    """
    where = store_of(store)
    refs = dict(models) if models is not None else dict(_found(pipe, where, tag))
    modules = {path: _component(pipe, path) for path in refs}
    if wrong := [path for path, module in modules.items() if module is None]:
        raise BindError(
            f"{type(pipe).__name__} has no module {', '.join(map(repr, wrong))}",
            hint=f"its components are {', '.join(_components(pipe)) or 'none'}; write a path as `model.encoder`",
        )
    loaded: dict[str, Compiled] = {}
    replaced: dict[str, nn.Module] = {}
    try:
        for path, ref in refs.items():
            given = where if parse_reference(ref).store is None else None
            loaded[path] = load(ref, modules[path], store=given, **options)
        for path, compiled in loaded.items():
            owner, _, name = path.rpartition(".")
            setattr(_reach(pipe, owner), name, compiled)
            replaced[path] = modules[path]  # type: ignore[assignment]
    except BaseException:
        for path, module in replaced.items():
            owner, _, name = path.rpartition(".")
            setattr(_reach(pipe, owner), name, module)
        for compiled in loaded.values():
            if compiled.artifact.regions:
                compiled.forward.detach()
        raise
    return replaced


def _found(pipe: Any, where: str, tag: str) -> Iterator[tuple[str, str]]:
    """The path of each component that has a model, and the model's reference. Raises NotFoundError for none."""
    names, found = [], {}
    for name, ref in _models_in_registry(pipe, where, tag) if is_registry(where) else _models_in_store(where, tag):
        names.append(name)
        for path in (name, name.replace("-", "_")):
            if _component(pipe, path) is not None:
                found[path] = ref
                break
    if not found:
        components = _components(pipe)
        raise NotFoundError(
            f"no model in {where} with the tag {tag} has the name of a component of {type(pipe).__name__}",
            issues=(
                Issue(f"the models: {', '.join(names) or 'none'}"),
                Issue(f"the components: {', '.join(components) or 'none'}"),
            ),
            hint="say which is which: aotc.attach(pipe, store, models={'transformer': 'model:tag'})",
            known=tuple(names),
        )
    yield from found.items()


def _models_in_store(where: str, tag: str) -> Iterator[tuple[str, str]]:
    if is_remote(where):
        from aotc.store.opening import open_readable

        entries = open_readable(where).tags()
    else:
        from aotc.store.layout.store import Store

        entries = Store.open(Path(where)).tags()
    for entry in entries:
        if entry.tag == tag:
            yield entry.model, f"{where}#{entry.model}:{tag}"


def _models_in_registry(pipe: Any, where: str, tag: str) -> Iterator[tuple[str, str]]:
    """A registry does not list its repositories: each component's is asked for."""
    from aotc.store.opening import open_readable

    for name in _components(pipe):
        reference = parse_reference(f"{where}/{name}:{tag}")
        try:
            open_readable(str(reference.store)).resolve(reference)
        except NotFoundError:
            continue
        yield name, str(reference)


def _reach(pipe: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        pipe = getattr(pipe, name, None)
    return pipe


def _component(pipe: Any, path: str) -> nn.Module | None:
    module = _reach(pipe, path)
    return module if isinstance(module, nn.Module) else None


def _components(pipe: Any) -> list[str]:
    """The names of the modules among its attributes."""
    if isinstance(pipe, nn.Module):
        return [name for name, _ in pipe.named_children()]
    return sorted(name for name, value in vars(pipe).items() if isinstance(value, nn.Module))

"""Docstrings and signatures as this repository writes them, explained to griffe."""

import re

import griffe

OUR_OWN = "for the package's own use"  # a docstring with these words has no reference
PARTS = "Blocks|Guarantees?|Raises|Returns|Warns|Yields"
PART = re.compile(rf"^((?:{PARTS})(?:, \w+)*): (\S.*(?:\n +.*)*)", re.MULTILINE)


class Contracts(griffe.Extension):
    def on_object(self, *, obj, **_):
        """Make a paragraph of each part of a contract; griffe takes `Raises: ...` for a title."""
        if obj.docstring:
            obj.docstring.value = PART.sub(r"\n**\1:** \2\n", obj.docstring.value)

    def on_class_members(self, *, cls, **_):
        for name, member in [*cls.members.items()]:
            if not member.is_alias and member.docstring and OUR_OWN in member.docstring.value:
                del cls.members[name]

    def on_function(self, *, func, loader, **_):
        """Show each argument of `**options: Unpack[...]`, as `takes` does for `help()`."""
        options = loader.modules_collection["arrowcache.reading.options"]
        for passed in [each for each in func.parameters if str(each.annotation).startswith("Unpack[")]:
            del func.parameters[passed.name]
            for name in options[str(passed.annotation)[len("Unpack[") : -1]].all_members:
                field, kind = options["LoaderOptions"][name], griffe.ParameterKind.keyword_only
                func.parameters.add(
                    griffe.Parameter(name, annotation=field.annotation, kind=kind, default=field.value)
                )

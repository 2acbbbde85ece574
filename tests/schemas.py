"""JSON schemas of growing difficulty, whose longest instances are short: strings, numbers and arrays are bounded."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def text(most: int = 8, **more: Any) -> Schema:
    return {"type": "string", "maxLength": most, **more}


def whole(least: int = 0, most: int = 99) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def items(of: Schema, most: int = 3, least: int = 0) -> Schema:
    return {"type": "array", "items": of, "minItems": least, "maxItems": most}


def record(*optional: str, **properties: Schema) -> Schema:
    """An object with these properties and no others; all required but the optional ones."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


YES = {"type": "boolean"}
NOTHING = {"type": "null"}

SCALARS: dict[str, Schema] = {
    "null": NOTHING,
    "boolean": YES,
    "digit": whole(0, 9),
    "negative": whole(-50, -10),
    "integer": whole(-1000, 1000),
    "number": {"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.25},
    "exclusive": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5},
    "string": text(),
    "longer-string": text(40),
    "exact-string": text(5, minLength=5),
    "empty-string": text(0),
    "pattern": text(12, pattern="^[A-Z]{2}-[0-9]{3,5}$"),
    "pattern-alternatives": text(12, pattern="^(foo|ba[rz])+$"),
    "enum": {"enum": ["red", "green", "blue"]},
    "enum-mixed": {"enum": ["a", 1, None, True, {"b": [2]}]},
    "enum-shared-beginnings": {"enum": ["in", "int", "integer", "interval"]},
    "enum-unicode": {"enum": ["größe", "日本", "😀", 'a"b\\c\n']},
    "const": {"const": {"version": 2, "name": "fixed"}},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
}
ARRAYS: dict[str, Schema] = {
    "digits": items(whole(0, 9), 6),
    "strings": items(text(), 4, 1),
    "exactly-two": items(YES, 2, 2),
    "empty-array": items(YES, 0),
    "nested-arrays": items(items(whole(0, 9), 3), 3),
    "deep-arrays": items(items(items(items(YES, 2), 2), 2), 2),
    "tuple": {"type": "array", "prefixItems": [text(4), whole(), YES], "items": False, "minItems": 3},
    "tuple-and-more": {"type": "array", "prefixItems": [text(4)], "items": whole(0, 9), "maxItems": 4},
    "array-of-enums": items({"enum": ["north", "south", "east", "west"]}, 5),
    "array-of-records": items(record(x=whole(), y=whole()), 3, 1),
    "array-of-unions": items({"anyOf": [whole(), text(4), NOTHING]}, 4),
}
OBJECTS: dict[str, Schema] = {
    "empty-object": record(),
    "one": record(a=whole()),
    "person": record(name=text(12), age=whole(0, 120), married=YES),
    "optional": record("b", "c", a=whole(), b=YES, c=text(4)),
    "all-optional": record("a", "b", "c", a=YES, b=YES, c=YES),
    "long-names": record(the_quick_brown_fox=YES, jumped_over_the_lazy_dog=YES, and_ran_away_from_it=YES),
    "odd-names": record(**{"a b": YES, 'c"d': YES, "": whole(0, 9), "größe": YES}),
    "nested": record(a=record(b=record(c=record(d=whole())))),
    "lists-inside": record(tags=items(text(6), 3), scores=items(whole(), 3)),
    "map": {
        "type": "object",
        "patternProperties": {"^[a-z]{1,4}$": whole(0, 9)},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "named-and-map": {
        "type": "object",
        "properties": {"id": whole()},
        "required": ["id"],
        "patternProperties": {"^is_[a-z]{1,6}$": YES},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    "pattern-names": {
        "type": "object",
        "patternProperties": {"^x_[a-z]{1,3}$": whole(0, 9)},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "nullable": record(
        a={"type": ["string", "null"], "maxLength": 6},
        b={"type": ["integer", "null"], "maximum": 9, "minimum": 0},
    ),
    "constants": record(kind={"const": "point"}, x=whole(), y=whole()),
    "formats": record(born={"type": "string", "format": "date"}, id={"type": "string", "format": "uuid"}),
    "wide": record(**{f"field_{i}": whole(0, 9) for i in range(20)}),
    "numbers": record(
        ratio={"type": "number", "minimum": -1, "maximum": 1, "multipleOf": 0.5},
        share={"type": "number", "minimum": 0, "maximum": 100, "multipleOf": 0.1},
    ),
    "tool-call": record(name={"enum": ["search", "open"]}, arguments=record(query=text(20), n=whole(1, 9))),
}
SHAPES: Schema = {
    "anyOf": [
        record(kind={"const": "circle"}, radius=whole()),
        record(kind={"const": "square"}, side=whole()),
        record(kind={"const": "text"}, value=text(6)),
    ]
}
UNIONS: dict[str, Schema] = {
    "any-of-scalars": {"anyOf": [whole(), YES, NOTHING, text(4)]},
    "tagged": SHAPES,
    "list-of-tagged": items(SHAPES, 3),
    "union-in-object": record(shape=SHAPES, label={"anyOf": [text(4), NOTHING]}),
    "one-of": {"oneOf": [record(a=whole()), record(b=YES)]},
    "all-of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 7}]},
    "type-list": {"type": ["integer", "boolean", "null"], "minimum": 0, "maximum": 9},
    "shared-beginnings": {"anyOf": [record(name=text(4), a=YES), record(name=text(4), b=YES)]},
}
REFERENCES: dict[str, Schema] = {
    "definition": {
        "$defs": {"point": record(x=whole(), y=whole())},
        **record(a={"$ref": "#/$defs/point"}, b={"$ref": "#/$defs/point"}),
    },
    "old-definition": {"definitions": {"n": whole()}, **items({"$ref": "#/definitions/n"}, 3)},
    "list": {
        "$defs": {
            "node": record("next", value=whole(0, 9), next={"anyOf": [NOTHING, {"$ref": "#/$defs/node"}]})
        },
        "$ref": "#/$defs/node",
    },
    "tree": {
        "$defs": {"tree": record(leaf=YES, children=items({"$ref": "#/$defs/tree"}, 1))},
        "$ref": "#/$defs/tree",
    },
    "expression": {
        "$defs": {
            "expression": {
                "anyOf": [
                    whole(0, 9),
                    record(
                        op={"enum": ["add", "mul"]}, left={"$ref": "#/$defs/expression"}, right=whole(0, 9)
                    ),
                ]
            }
        },
        "$ref": "#/$defs/expression",
    },
    "mutual": {
        "$defs": {
            "even": {"anyOf": [NOTHING, record(odd={"$ref": "#/$defs/odd"})]},
            "odd": {"anyOf": [YES, record(even={"$ref": "#/$defs/even"})]},
        },
        "$ref": "#/$defs/even",
    },
    "order": record(
        "note",
        id={"type": "string", "pattern": "^ORD-[0-9]{4}$"},
        lines=items(record(sku=text(6, pattern="^[A-Z]{3}[0-9]{1,3}$"), n=whole(1, 9), gift=YES), 2, 1),
        state={"enum": ["new", "paid", "sent", "returned"]},
        placed={"type": "string", "format": "date"},
        note=text(16),
    ),
}
SCHEMAS: dict[str, Schema] = {**SCALARS, **ARRAYS, **OBJECTS, **UNIONS, **REFERENCES}

# Their instances have no longest one: a reply must be given a reason to end.
ENDLESS = frozenset({"list", "tree", "expression", "mutual"})

"""Nothing that a model's folder holds is executed, neither its Python files nor what its template tries."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from slipstream.engine.api import Chat
from slipstream.engine.errors import InvalidRequest, LoadError
from slipstream.engine.service.start.launch import launch
from slipstream.engine.settings import Settings
from slipstream.engine.text.chat import load_chat_template
from slipstream.engine.text.tokenizer import Tokenizer

TARGET = Path(__file__).parents[2] / "demo" / "target"
CODE = "from pathlib import Path\nPath({mark!r}).write_text('executed')\nclass Model: ...\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo model."""
    path = tmp_path / "model"
    shutil.copytree(TARGET, path)
    return path


def test_code_of_the_models_repository_is_left_alone(folder: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    for name in (
        "modeling_demo.py",
        "configuration_demo.py",
        "tokenization_demo.py",
        "__init__.py",
        "conftest.py",
    ):
        (folder / name).write_text(CODE.format(mark=str(mark)))
    for name, classes in (
        (
            "config.json",
            {"AutoConfig": "configuration_demo.Model", "AutoModelForCausalLM": "modeling_demo.Model"},
        ),
        ("tokenizer_config.json", {"AutoTokenizer": ["tokenization_demo.Model", None]}),
    ):
        path = folder / name
        path.write_text(
            json.dumps({**json.loads(path.read_text()), "auto_map": classes, "trust_remote_code": True})
        )
    engine = launch(Settings(model=str(folder), ctx_size=128, parallel=1, threads=1))
    assert asyncio.run(_one(engine)) > 0
    assert not mark.exists()


async def _one(engine: object) -> int:
    n_tokens = len(await engine.prompt_ids(Chat([{"role": "user", "content": "x"}])))
    await engine.close()
    return n_tokens


REACHING_OUT = [
    "{% import 'os' as os %}{{ os.system('touch MARK') }}",
    "{% include '/etc/passwd' %}",
    "{% extends '/etc/passwd' %}",
    "{% from 'os' import system %}{{ system('touch MARK') }}",
    "{{ cycler.__init__.__globals__.os.popen('touch MARK').read() }}",
    "{{ lipsum.__globals__['os'].system('touch MARK') }}",
    "{{ namespace.__init__.__globals__.sys.modules }}",
    "{{ self.__init__.__globals__.__builtins__.open('MARK', 'w') }}",
    "{{ raise_exception.__globals__['__builtins__']['open']('MARK', 'w') }}",
    "{{ raise_exception.__code__ }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ messages.append({'role': 'user', 'content': 'x'}) }}",
    "{{ messages[0].update({'content': 'y'}) }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "{{ ('%s' | attr('__mod__')).__self__ }}",
    "{{ messages | map(attribute='__class__') | list }}{{ (messages | map(attribute='__class__') | list)[0].__mro__ }}",
]


@pytest.mark.parametrize("source", REACHING_OUT)
def test_templates_do_not_reach_out(tmp_path: Path, source: str) -> None:
    mark = tmp_path / "mark"
    (tmp_path / "chat_template.jinja").write_text(source.replace("MARK", str(mark)))
    messages = [{"role": "user", "content": "x"}]
    told = ""
    try:
        found = load_chat_template(tmp_path, Tokenizer(TARGET))
        assert found is not None
        told = found.render(Chat(messages))
    except (InvalidRequest, LoadError) as error:
        reason = str(error)
    else:
        reason = ""
    assert not told, "what is out of reach is undefined, or an error"
    assert "root:" not in reason
    assert not mark.exists()
    assert messages == [{"role": "user", "content": "x"}]

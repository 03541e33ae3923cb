"""What goes into a text model, against transformers' own code, of dumps and of llama-mtmd-cli. Slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import llama_server
import numpy as np
import pytest
from command import run
from ext.preprocess.seeing import GEMMA, QWEN, eye_file, gemma3, qwen2vl, text_file
from ext.preprocess.strangers import photograph
from optional import needs
from places import ROOT

pytestmark = [needs("torch", "transformers", "PIL", "safetensors"), pytest.mark.slow]
PLACES = [str(ROOT), str(ROOT / "reference"), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "passive", "PYTHONPATH": os.pathsep.join(PLACES)}
PROMPT = {gemma3: "<bos>Hi <start_of_image> what?", qwen2vl: "Hi <|vision_start|><|image_pad|><|vision_end|> what?"}
ROWS, COLUMNS = 3, 4  # of a picture of 120 x 90 in blocks of 28 pixels
FOUR = 4  # rows that Gemma's projector gives here


@pytest.fixture(scope="module", params=PROMPT, ids=lambda make: make.__name__)
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ck")
    picture = folder / "p.png"
    photograph().resize((120, 90)).save(picture)
    return request.param, request.param(folder / request.param.__name__), picture


def dumped(make, folder, picture):
    """What an engine of one's own would dump: the model's parts, called by themselves; nothing of llamadiff."""
    import torch
    import transformers
    from PIL import Image

    kind = transformers.AutoModelForImageTextToText
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    image = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")(
        images=[Image.open(picture).convert("RGB")], return_tensors="pt"
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if make is gemma3:
        text = "<bos>Hi \n\n<start_of_image>" + "<image_soft_token>" * FOUR + "<end_of_image>\n\n what?"
    else:
        text = PROMPT[make].replace("<|image_pad|>", "<|image_pad|>" * ROWS * COLUMNS)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        found = model.model.get_image_features(**image)
        rows = found.pooler_output if hasattr(found, "pooler_output") else found
        rows = torch.cat([*rows]) if isinstance(rows, (list, tuple)) else rows
        embeds = model.get_input_embeddings()(ids)[0]
    place = tokenizer.convert_tokens_to_ids(GEMMA[3] if make is gemma3 else QWEN[3])
    here = np.flatnonzero(ids[0].numpy() == place)
    values = embeds.numpy().copy()
    values[here] = rows.reshape(-1, values.shape[1]).numpy()
    count, first, behind = len(values), here[0], here[-1] + 1
    mask, positions = np.tri(count, dtype=bool), np.arange(count)[None]
    if make is gemma3:
        mask[first:behind, first:behind] = True
    else:
        grid = first + np.indices((1, ROWS, COLUMNS)).reshape(3, -1)
        rest = first + max(ROWS, COLUMNS) + np.arange(count - behind)
        positions = np.concatenate([np.tile(np.arange(first), (3, 1)), grid, np.tile(rest, (3, 1))], 1)
    return values, positions, mask, slice(first, behind)


def judged(make, folder, picture, path, values, positions, mask):
    np.savez(path, inputs_embeds=values, position_ids=positions, attention_mask=mask)
    report = path.with_suffix(".json")
    done = run("preprocess", folder, picture, "--prompt", PROMPT[make], "--candidate", path, "-o", report)
    found = json.loads(report.read_text("utf-8"))
    assert done.returncode == {"match": 0, "wrong": 1}[found["verdict"]], done.stderr
    return found["verdict"], [f"{each['step']}: {each['says']}" for each in found["causes"]]


def test_dumps(checkpoint, tmp_path):
    """Right, and with a mistake of each kind."""
    make, folder, picture = checkpoint
    values, positions, mask, here = dumped(make, folder, picture)
    path = tmp_path / "inputs.npz"
    assert judged(*checkpoint, path, values, positions, mask) == ("match", [])
    scaled = values.copy()
    scaled[here] *= 8
    verdict, causes = judged(*checkpoint, path, scaled, positions, mask)
    assert verdict == "wrong"
    assert "the picture's rows are multiplied by 8" in causes[0]
    causal = judged(*checkpoint, path, values, positions, np.tri(len(values), dtype=bool))
    full = mask.copy()
    full[here, here] = True
    both_ways = judged(*checkpoint, path, values, positions, full)
    assert [causal[0], both_ways[0]] == (["wrong", "match"] if make is gemma3 else ["match", "wrong"])
    plain = judged(*checkpoint, path, values, np.arange(len(values))[None], mask)
    assert plain[0] == ("match" if make is gemma3 else "wrong")


@pytest.mark.parametrize("more", [(), ("-fa", "off"), ("-b", "8", "-ub", "8")], ids=" ".join)
def test_llama_mtmd_cli_gives_its_text_model_what_the_checkpoint_does(more, tmp_path):
    """Its tokens, rows, positions of four sections, masks, as watch keeps them; a picture of another size is wrong."""
    folder, picture = qwen2vl(tmp_path / "ck"), tmp_path / "p.png"
    photograph().resize((120, 90)).save(picture)
    program = [
        llama_server.binary("llama-mtmd-cli"), "--model", text_file(folder, tmp_path / "t.gguf"), "--mmproj",
        eye_file(folder, tmp_path / "v.gguf"), "--image", picture, "-p", "Hi <__media__> what?", "-n", "3", "-c", "512",
        "--temp", "0", "-t", "2", "--jinja", *more,
    ]  # fmt: skip
    verdicts = []
    for number, again in enumerate(((), ("--image-min-tokens", "20"))):
        kept = tmp_path / f"kept{number}"
        watch = [sys.executable, "-m", "llamadiff", "watch", "--every", "1", "--keep", kept, "--", *program, *again]
        subprocess.run(watch, env=ENVIRONMENT, check=True, capture_output=True, stdin=subprocess.DEVNULL)
        done = run("preprocess", folder, picture, "--prompt", PROMPT[qwen2vl], "--candidate", kept)
        verdicts.append((done.returncode, " ".join(done.stdout.split())))
    assert verdicts[0][0] == 0, verdicts[0]
    assert "22 rows, 12 of them the encoder's" in verdicts[0][1]
    assert verdicts[1][0] == 1
    assert "rows are inserted, the checkpoint's encoder gives 12" in verdicts[1][1]

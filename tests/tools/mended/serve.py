"""A request to llama.cpp's server in xllamacpp: a picture or a sound (FILE), or ids of a prompt and its drafts.

python serve.py PACKAGE MODEL MMPROJ FILE
python serve.py PACKAGE MODEL 1,17,5
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path

package, model, *words = sys.argv[1:]
sys.path.insert(0, package)
import xllamacpp as x  # noqa: E402

params = x.CommonParams()
params.model.path, params.n_ctx, params.warmup, params.fit_params = model, 4096, False, False
params.cpuparams.n_threads, params.n_parallel = 2, 1
if len(words) == 1:
    kind = x.ggml_type.GGML_TYPE_F32
    params.speculative.types = [x.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_MTP]
    params.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    for held in (params, params.speculative.draft):
        held.cache_type_k = held.cache_type_v = kind
    ids = [int(word) for word in words[0].split(",")]
    said = x.Server(params).handle_completions({"prompt": ids, "n_predict": 4, "temperature": 0})
else:
    params.mmproj.path, path = words[0], Path(words[1])
    data = base64.b64encode(path.read_bytes()).decode()
    if path.suffix == ".png":
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    else:
        part = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    content = [part, {"type": "text", "text": "once"}]
    said = x.Server(params).handle_chat_completions(
        {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    )
if "choices" not in said:
    sys.exit(str(said))

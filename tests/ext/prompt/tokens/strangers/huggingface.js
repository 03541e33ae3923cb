// npm's @huggingface/tokenizers: node huggingface.js FOLDER TOKENIZER.json [--back], lines as engine.py has them.
const { answer, from } = require("./lines.js");
const { Tokenizer } = from(process.argv[2], "@huggingface/tokenizers");
const json = JSON.parse(require("fs").readFileSync(process.argv[3], "utf-8"));
const tokenizer = new Tokenizer(json, {});

// Each token by itself: the package has no stream.
const decode = (ids) => ids.map((id) => tokenizer.decode([id], { clean_up_tokenization_spaces: false }));
answer(process.argv[4] === "--back" ? decode : (text) => tokenizer.encode(text).ids);

// npm's gpt-tokenizer: node gpt_tokenizer.js FOLDER ENCODING [--back], lines as engine.py has them.
const { answer, from } = require("./lines.js");
const { encode, decodeGenerator } = from(process.argv[2], "gpt-tokenizer/cjs/encoding/" + process.argv[3]);

const decode = (ids) => [...decodeGenerator(ids)]; // by characters: as many texts as it likes
answer(process.argv[4] === "--back" ? decode : (text) => encode(text, { allowedSpecial: "all" }));

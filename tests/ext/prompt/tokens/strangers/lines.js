// A JSON value a line in, an answer a line out.
exports.answer = (answer) => {
  const lines = require("readline").createInterface({ input: process.stdin, crlfDelay: Infinity });
  lines.on("line", (line) => process.stdout.write(JSON.stringify(answer(JSON.parse(line))) + "\n"));
};
// A package from a folder in which npm has installed it.
exports.from = (folder, name) => require("module").createRequire(folder + "/any.js")(name);

// GGUF files: what they state, and their tensors as float32.
'use strict';
const fs = require('fs');
const { decode } = require('./blocks');

const MAGIC = 0x46554747;

class Reader {
  constructor(bytes) {
    this.bytes = bytes;
    this.at = 0;
  }

  number(size, method) {
    const value = this.bytes[method](this.at);
    this.at += size;
    return Number(value);
  }

  u32() { return this.number(4, 'readUInt32LE'); }
  u64() { return this.number(8, 'readBigUInt64LE'); }

  text() {
    const length = this.u64();
    this.at += length;
    return this.bytes.toString('utf8', this.at - length, this.at);
  }

  value(type) {
    const [size, method] = NUMBERS[type] || [];
    if (method) return this.number(size, method);
    if (type === 7) return this.number(1, 'readUInt8') !== 0;
    if (type === 8) return this.text();
    if (type !== 9) throw new Error(`a value of type ${type}, which GGUF does not have`);
    const inner = this.u32();
    return Array.from({ length: this.u64() }, () => this.value(inner));
  }
}

const NUMBERS = {
  0: [1, 'readUInt8'], 1: [1, 'readInt8'], 2: [2, 'readUInt16LE'], 3: [2, 'readInt16LE'], 4: [4, 'readUInt32LE'],
  5: [4, 'readInt32LE'], 6: [4, 'readFloatLE'], 10: [8, 'readBigUInt64LE'], 11: [8, 'readBigInt64LE'],
  12: [8, 'readDoubleLE'],
};

function readTensors(reader, count, alignment) {
  const found = Array.from({ length: count }, () => {
    const name = reader.text();
    const shape = Array.from({ length: reader.u32() }, () => reader.u64());
    return { name, shape, type: reader.u32(), offset: reader.u64() };
  });
  const start = Math.ceil(reader.at / alignment) * alignment;
  return new Map(found.map((tensor) => [tensor.name, { ...tensor, offset: start + tensor.offset }]));
}

function open(path) {
  const reader = new Reader(fs.readFileSync(path));
  if (reader.u32() !== MAGIC) throw new Error(`${path}: no GGUF file`);
  reader.u32(); // the version
  const [tensorCount, keyCount] = [reader.u64(), reader.u64()];
  const keys = new Map();
  for (let i = 0; i < keyCount; i++) {
    const key = reader.text();
    keys.set(key, reader.value(reader.u32()));
  }
  const tensors = readTensors(reader, tensorCount, keys.get('general.alignment') || 32);
  return { path, keys, tensors, bytes: reader.bytes };
}

// A tensor with its type and its values; null where the file has none of that name.
function tensorOf(file, name) {
  const tensor = file.tensors.get(name);
  if (!tensor) return null;
  const count = tensor.shape.reduce((a, b) => a * b, 1);
  return { type: tensor.type, width: tensor.shape[0], values: decode(file.bytes, tensor.offset, tensor.type, count) };
}

module.exports = { open, tensorOf };

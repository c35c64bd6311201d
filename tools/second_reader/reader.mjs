#!/usr/bin/env node
/**
 * A second reader of ups_store files, version 1.0. It was written from the pages in docs/format alone, without a look
 * at the package, so that the specification is read by somebody who doesn't know what was meant. Numbers in comments
 * are clauses of it. No dependencies; Node 20 or newer. Offsets and sizes in the file are BigInt, for a number that a
 * file claims may be any 64-bit value; what is compared with a limit below 2^53 becomes a Number then.
 */
import fs from 'node:fs';
import path from 'node:path';
import { createHash } from 'node:crypto';
import { pathToFileURL } from 'node:url';

const COMMENT = Buffer.from('ups_store: a Zarr v3 hierarchy');
const FEATURES = ['packed', 'ragged'];
const ITEM_SIZES = {
  bool: 1, int8: 1, uint8: 1, int16: 2, uint16: 2, float16: 2, bfloat16: 2,
  int32: 4, uint32: 4, float32: 4, int64: 8, uint64: 8, float64: 8,
};
const MIB = 1 << 20;
const MAX_TEXT = 16 * MIB; // 9.1, as those below
const MAX_DIRECTORY = 2 * MIB;
const MAX_DEPTH = 100;
const MAX_ARRAYS = 4096;
const MAX_AXES = 32;
const MAX_METADATA = 64n * BigInt(MIB);
const MAX_EMPTY_SAMPLES = 1 << 24;
const MAX_PARTITIONS = 99999;
const MAX_FEATURES = 64;
const MAX_ELEMENTS = 2n ** 60n;
const MAX_PACKED_PAYLOAD = 2n ** 31n - 64n; // 13.8
const MAX_LISTED = 100000; // not of the format: `digest` lists samples of a ragged array only up to here

/** What a file is refused for: a clause, and in words. `step` is the step of 7.1, where there is one. */
export class Refusal extends Error {
  constructor(clause, why) {
    super(why);
    this.clause = clause;
    this.step = null;
  }

  /** The answer as JSON has it. */
  answer(question) {
    return { [question]: 'refused', clause: this.clause, ...(this.step && { step: this.step }), why: this.message };
  }
}

function need(condition, clause, why) {
  if (!condition) throw new Refusal(clause, why);
}

/** Runs one step of 7.1 and notes in a refusal which it was. */
function during(step, work) {
  try {
    return work();
  } catch (error) {
    if (error instanceof Refusal) error.step ??= `7.1.${step}`;
    throw error;
  }
}

// ---- numbers and checksums ------------------------------------------------------------------------------------------

const align = (x, a) => ((x + a - 1n) / a) * a; // 1.2
const product = (numbers) => numbers.reduce((all, n) => all * BigInt(n), 1n);
const smaller = (a, b) => (a < b ? a : b);
const sha256 = (bytes) => createHash('sha256').update(bytes).digest('hex');
const quote = (text) => JSON.stringify(String(text).slice(0, 100)); // of a text that a file gave, for a message
const hex64 = (text) => /^[0-9a-f]{64}$/.test(text);

/** The eight tables of a reflected polynomial, one behind the other. */
function crcTables(polynomial) {
  const table = new Int32Array(8 * 256);
  for (let i = 0; i < 256; i++) {
    let c = i;
    for (let bit = 0; bit < 8; bit++) c = c & 1 ? (c >>> 1) ^ polynomial : c >>> 1;
    table[i] = c;
  }
  for (let i = 256; i < table.length; i++) table[i] = (table[i - 256] >>> 8) ^ table[table[i - 256] & 255];
  return table;
}

/** Makes the function (bytes, crc of what came before) => crc, of eight bytes a step (1.3). */
function makeCrc(polynomial) {
  const t = crcTables(polynomial);
  return (bytes, before = 0) => {
    let c = ~before;
    let i = 0;
    for (const last = bytes.length - 8; i <= last; i += 8) {
      c ^= bytes[i] | (bytes[i + 1] << 8) | (bytes[i + 2] << 16) | (bytes[i + 3] << 24);
      c = t[1792 + (c & 255)] ^ t[1536 + ((c >>> 8) & 255)] ^ t[1280 + ((c >>> 16) & 255)] ^ t[1024 + (c >>> 24)]
        ^ t[768 + bytes[i + 4]] ^ t[512 + bytes[i + 5]] ^ t[256 + bytes[i + 6]] ^ t[bytes[i + 7]];
    }
    for (; i < bytes.length; i++) c = t[(c ^ bytes[i]) & 255] ^ (c >>> 8);
    return ~c >>> 0;
  };
}

export const crc32 = makeCrc(0xedb88320);
export const crc32c = makeCrc(0x82f63b78);

// ---- files ----------------------------------------------------------------------------------------------------------

class File {
  constructor(name) {
    // Without O_NONBLOCK, opening a named pipe would wait for a writer.
    this.fd = fs.openSync(name, fs.constants.O_RDONLY | fs.constants.O_NONBLOCK);
    const status = fs.fstatSync(this.fd, { bigint: true });
    this.regular = status.isFile();
    this.size = status.size;
  }

  close() {
    fs.closeSync(this.fd);
  }

  /** Reads exactly `length` bytes into `buffer`; a short read is an error like any other (7.5). */
  read(at, length, memory = null) {
    const end = at + BigInt(length);
    need(end <= this.size, '11.1', `bytes ${at}..${end} are outside of the file`);
    const buffer = memory ?? Buffer.allocUnsafe(length); // not before the length is known to be there
    for (let done = 0; done < length;) {
      const n = fs.readSync(this.fd, buffer, done, length - done, at + BigInt(done));
      need(n > 0, '7.5', 'the file became shorter while it was read');
      done += n;
    }
    return buffer.subarray(0, length);
  }
}

/** Bytes start..end of a file in order, read in blocks of 1 MiB. `crc` is the CRC-32 of all blocks read so far. */
class Stream {
  constructor(file, start, end, { checksum = false } = {}) {
    Object.assign(this, { file, at: start, end, checksum, crc: 0, used: 0 });
    this.buffer = Buffer.allocUnsafe(Number(smaller(BigInt(MIB), end - start)));
    this.block = this.buffer.subarray(0, 0);
  }

  refill() {
    const length = Number(smaller(BigInt(this.buffer.length), this.end - this.at));
    need(length > 0, '11.1', 'more bytes were asked for than the entry has');
    this.block = this.file.read(this.at, length, this.buffer);
    this.at += BigInt(length);
    this.used = 0;
    if (this.checksum) this.crc = crc32(this.block, this.crc);
  }

  /** Hands the next `length` bytes to each sink, piece by piece. A piece is valid only during the call. */
  take(length, ...sinks) {
    for (let left = BigInt(length); left > 0n;) {
      if (this.used === this.block.length) this.refill();
      const n = Number(smaller(left, BigInt(this.block.length - this.used)));
      const piece = this.block.subarray(this.used, this.used + n);
      this.used += n;
      left -= BigInt(n);
      for (const sink of sinks) sink(piece);
    }
  }

  /** Takes what is left. */
  drain(...sinks) {
    this.take(this.end - this.at + BigInt(this.block.length - this.used), ...sinks);
  }

  /** The next few bytes as a piece of memory of their own. */
  bytes(length) {
    const pieces = [];
    this.take(length, (piece) => pieces.push(Buffer.from(piece)));
    return pieces.length === 1 ? pieces[0] : Buffer.concat(pieces);
  }
}

/** A sink that sums up a checksum: `sum.add` takes pieces, `sum.value` is the result. */
function running(crc) {
  const sum = { value: 0, add: (piece) => { sum.value = crc(piece, sum.value); } };
  return sum;
}

// ---- canonical JSON (4.1) -------------------------------------------------------------------------------------------

const SHORT_ESCAPES = '"\\btnfr';
const LONG_ESCAPE = /^u00(0[0-7be-f]|1[0-9a-f])$/; // 4.1.3: not those that have a short one
const isDigit = (code) => code >= 48 && code <= 57;

/** Checks the form of a text, 4.1.1 to 4.1.5. `onNumber` gets each number as it is written. */
class FormCheck {
  constructor(text, onNumber = null) {
    Object.assign(this, { text, onNumber, at: 0 });
    need(text[0] === '{', '4.1', 'the document is not an object');
    this.value(1);
    need(this.at === text.length, '4.1', 'something follows the document');
  }

  wrong(why) {
    throw new Refusal('4.1', `${why} at character ${this.at}`);
  }

  accept(character) {
    if (this.text[this.at] !== character) return false;
    this.at++;
    return true;
  }

  expect(token) {
    if (!this.text.startsWith(token, this.at)) this.wrong(`${token} is missing`);
    this.at += token.length;
  }

  value(depth) {
    const first = this.text[this.at];
    if ((first === '{' || first === '[') && depth > MAX_DEPTH) this.wrong('nested too deep');
    if (first === '{') this.object(depth);
    else if (first === '[') this.list(depth);
    else if (first === '"') this.string();
    else if (first === 't') this.expect('true');
    else if (first === 'f') this.expect('false');
    else if (first === 'n') this.expect('null');
    else this.number();
  }

  object(depth) {
    this.expect('{');
    if (this.accept('}')) return;
    let last = null;
    do {
      const start = this.at;
      this.string();
      const key = JSON.parse(this.text.slice(start, this.at));
      if (last !== null && !(last < key)) this.wrong('keys are not in order'); // JavaScript compares UTF-16 code units
      last = key;
      this.expect(':');
      this.value(depth + 1);
    } while (this.accept(','));
    this.expect('}');
  }

  list(depth) {
    this.expect('[');
    if (this.accept(']')) return;
    do this.value(depth + 1); while (this.accept(','));
    this.expect(']');
  }

  string() {
    this.expect('"');
    for (;;) {
      const code = this.text.charCodeAt(this.at);
      if (!(code >= 32)) this.wrong('a character that must be escaped, or the end, in a string');
      if (code === 34) break;
      if (code === 92) this.escape();
      else this.at++;
    }
    this.at++;
  }

  escape() {
    const rest = this.text.slice(this.at + 1, this.at + 6);
    if (rest && SHORT_ESCAPES.includes(rest[0])) this.at += 2;
    else if (LONG_ESCAPE.test(rest)) this.at += 6;
    else this.wrong('another escape than the shortest');
  }

  /** Passes over digits and says how many there were. */
  digits() {
    const start = this.at;
    while (isDigit(this.text.charCodeAt(this.at))) this.at++;
    return this.at - start;
  }

  /** 4.1.4. A number ends where no digit follows; whatever stands there instead is for the caller to judge. */
  number() {
    const start = this.at;
    this.accept('-');
    const first = this.at;
    const zero = this.text[first] === '0';
    const length = this.digits();
    if (length < 1 || length > (zero ? 1 : 21)) this.wrong('no value, or an integer of another form');
    const fraction = this.text[this.at] === '.' && this.fraction(zero);
    if (this.text[this.at] === 'e') this.exponent(length === 1 && !zero);
    else if (zero && !fraction && first > start) this.wrong('a negative zero');
    const token = this.text.slice(start, this.at);
    if (!Number.isFinite(Number(token))) this.wrong('a number whose nearest double is not finite');
    if (this.onNumber) this.onNumber(token);
  }

  fraction(zero) {
    const start = ++this.at;
    if (!this.digits() || this.text[this.at - 1] === '0') this.wrong('a fraction that is empty or ends in 0');
    // With an exponent the integer part is not 0 (see below), so this may come first.
    if (zero && this.text.startsWith('000000', start)) this.wrong('a fraction with six leading zeros');
    return true;
  }

  exponent(oneDigit) {
    const match = /^e(?:\+(2[1-9]|[3-9]\d|[12]\d\d|30[0-8])|-([7-9]|[1-9]\d|[12]\d\d|3[01]\d|32[0-4]))(?!\d)/
      .exec(this.text.slice(this.at, this.at + 6));
    if (!oneDigit || !match) this.wrong('an exponent of another form');
    this.at += match[0].length;
  }
}

/** The text of a document whose form has been checked. */
export function checkedText(bytes, onNumber = null) {
  let text;
  try {
    // A byte order mark stays in the text, where it is refused, for the document begins with a brace.
    text = new TextDecoder('utf-8', { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    throw new Refusal('4.1', 'the text is not UTF-8');
  }
  new FormCheck(text, onNumber);
  return text;
}

/** The position behind the string that begins at `at`, of a text whose form has been checked. */
function skipString(text, at) {
  for (at++; text[at] !== '"'; at++) if (text[at] === '\\') at++;
  return at + 1;
}

/** The position behind the value that begins at `at`. */
function skipValue(text, at) {
  for (let depth = 0; ;) {
    const c = text[at];
    if (c === '"') at = skipString(text, at);
    else if (c === ',' || c === ':') at++;
    else if (c === '{' || c === '[') [depth, at] = [depth + 1, at + 1];
    else if (c === '}' || c === ']') [depth, at] = [depth - 1, at + 1];
    else while (at < text.length && !',]}'.includes(text[at])) at++;
    if (depth === 0) return at;
  }
}

/** A value in a text whose form has been checked: where it stands. Nothing is built of what nobody asks for. */
class Value {
  constructor(text, start = 0, end = text.length) {
    Object.assign(this, { text, start, end });
  }

  get raw() {
    return this.text.slice(this.start, this.end);
  }

  is(first) {
    return this.text[this.start] === first;
  }

  * members(clause) {
    need(this.is('{'), clause, 'an object is missing');
    for (let at = this.start + 1; at < this.end - 1;) {
      const colon = skipString(this.text, at);
      const end = skipValue(this.text, colon + 1);
      yield [JSON.parse(this.text.slice(at, colon)), new Value(this.text, colon + 1, end)];
      at = end + 1;
    }
  }

  /** The members of an object that has all `required` keys and, unless `more`, none beside those and the `optional`. */
  fields(clause, required, { optional = [], more = false } = {}) {
    const found = {};
    for (const [key, value] of this.members(clause)) {
      if (required.includes(key) || optional.includes(key)) found[key] = value;
      else need(more, clause, `the key ${quote(key)} is not one of ${[...required, ...optional].join(', ')}`);
    }
    for (const key of required) need(found[key], clause, `the key ${key} is missing`);
    return found;
  }

  /** The elements of a list that has at most `most`. */
  items(clause, most) {
    need(this.is('['), clause, 'a list is missing');
    const found = [];
    for (let at = this.start + 1; at < this.end - 1;) {
      need(found.length < most, clause, `a list has more than ${most} elements`);
      const end = skipValue(this.text, at);
      found.push(new Value(this.text, at, end));
      at = end + 1;
    }
    return found;
  }

  string(clause) {
    need(this.is('"'), clause, 'a string is missing');
    return JSON.parse(this.raw);
  }

  /** An integer from 0 to 2^53 - 1, written as one. */
  integer(clause) {
    const text = this.text.slice(this.start, Math.min(this.end, this.start + 17));
    const good = /^(0|[1-9]\d{0,15})$/.test(text) && Number.isSafeInteger(Number(text));
    need(good, clause, 'an integer from 0 to 2^53 - 1 is missing');
    return Number(text);
  }
}

// ---- the documents --------------------------------------------------------------------------------------------------

/** Steps 2 and 3 of 7.1: the root document (4.3) and what it says of version, features and kind. */
function readRoot(bytes, kind) {
  const root = during(2, () => {
    const fields = new Value(checkedText(bytes)).fields('4.3', ['attributes', 'node_type', 'zarr_format']);
    need(fields.node_type.raw === '"group"' && fields.zarr_format.raw === '3', '4.3', 'not a group of Zarr v3');
    return upsStore(findMember(fields.attributes, 'ups_store', '4.3'));
  });
  during(3, () => {
    const { requires, minor } = root;
    const unknown = requires.find((feature) => !FEATURES.includes(feature));
    need(unknown === undefined, '10.3', `the file requires ${quote(unknown)}, which is unknown`);
    need(requires.length < 2, '10.3', 'the file requires both packed and ragged');
    need(!root.packed || minor === 0, '10.3', 'a packed store of a newer minor version');
    need(!kind || kind === (root.packed ? 'packed' : 'mapped'), '7.1', `not a ${kind} store`);
  });
  return root;
}

/** The value of one key of an object, or undefined. */
function findMember(object, wanted, clause) {
  let found;
  for (const [key, value] of object.members(clause)) if (key === wanted) found = value;
  return found;
}

/** The format's own key of the root's attributes (4.3). Another major version is refused before the rest is judged. */
function upsStore(value) {
  need(value, '4.3', 'the attributes have no ups_store');
  const version = findMember(value, 'format_version', '4.3')?.string('10.1') ?? '';
  const match = /^(0|[1-9]\d{0,5})\.(0|[1-9]\d{0,5})$/.exec(version);
  need(match, '10.1', 'format_version is not MAJOR.MINOR');
  need(match[1] === '1', '10.2', `version ${version} is of another major version`);
  const minor = Number(match[2]);
  const keys = ['config_hash', 'format_version', 'identity', 'requires'];
  const fields = value.fields('4.3', keys, { optional: ['packed'], more: minor > 0 });
  const requires = fields.requires.items('4.3', MAX_FEATURES).map((item) => item.string('4.3'));
  const named = requires.every((name) => /^[a-z0-9][a-z0-9_.-]{0,63}$/.test(name));
  need(named, '4.3', 'requires has what is no name of a feature');
  const sorted = requires.every((name, i) => i === 0 || requires[i - 1] < name);
  need(sorted, '4.3', 'requires is not sorted, or has a feature twice');
  need(requires.includes('packed') === Boolean(fields.packed), '4.3', 'requires and the key packed disagree');
  const packed = fields.packed ? packedMark(fields.packed) : null;
  return { minor, requires, packed, configHash: fields.config_hash.string('8.3'), identity: fields.identity };
}

/** The mark of a packed store (13.2). */
function packedMark(value) {
  const fields = value.fields('13.2', ['codec', 'fingerprint', 'level']);
  const codec = fields.codec.string('13.2');
  const level = fields.level.integer('13.2');
  const fingerprint = fields.fingerprint.string('13.2');
  need((codec === 'blosc' && level <= 9) || (codec === 'pcodec' && level <= 12), '13.2', 'codec or level is another');
  need(hex64(fingerprint), '13.2', 'the fingerprint is not 64 lower-case hexadecimal digits');
  return { codec, level, fingerprint };
}

/** Step 4 of 7.1: the identity (8.1) and its hash (8.3). Returns the arrays of the file in order. */
function readIdentity(root) {
  const hash = sha256(Buffer.from(root.identity.raw));
  need(hash === root.configHash, '8.3', 'config_hash is not the sha256 of the identity');
  const fields = root.identity.fields('8.1', ['arrays', 'constants', 'content'], { optional: ['partition'] });
  need(fields.content.is('{'), '8.1', 'content is not an object');
  const arrays = [];
  for (const [name, value] of fields.arrays.members('8.1')) {
    arrays.push(...namedArrays(name, value));
    need(arrays.length <= MAX_ARRAYS, '9.1', `more than ${MAX_ARRAYS} arrays`);
  }
  arrays.sort((a, b) => (a.name < b.name ? -1 : 1)); // names are ASCII: the order of their bytes (2.2)
  const twice = arrays.find((a, i) => a.name === arrays[i + 1]?.name);
  need(!twice, '14.1', `the name ${twice?.name} of a companion is taken`);
  const ragged = arrays.some((a) => a.kind === 'ragged');
  need(ragged === root.requires.includes('ragged'), '10.3', 'requires and the arrays disagree about ragged');
  readConstants(fields.constants, arrays);
  return { arrays, partition: fields.partition ? readPartition(fields.partition) : null };
}

/** One member of the identity's `arrays`: one array, or the three of a ragged array. */
function namedArrays(name, value) {
  const named = /^(?!__)[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$/.test(name) && name !== 'zarr.json';
  need(named, '4.2', `${quote(name)} is no name of an array`);
  const fields = value.fields('8.1', ['dims', 'dtype', 'shape']);
  const dtype = fields.dtype.string('8.1');
  const dims = fields.dims.items('8.1', MAX_AXES + 1).map((item) => item.string('8.1'));
  const axes = fields.shape.items('8.1', MAX_AXES);
  need(Object.hasOwn(ITEM_SIZES, dtype), '4.7', `${name}: an unknown data type`);
  const nameless = dims.some((d, i) => !isDimension(d) || (i > 0 && d === 'sample'));
  need(!nameless && new Set(dims).size === dims.length, '4.5', `${name}: names of dimensions`);
  const sampled = dims[0] === 'sample';
  need(axes.length === dims.length - (sampled ? 1 : 0), '8.1', `${name}: another number of axes than of dimensions`);
  if (sampled && axes[0]?.raw === 'null') return raggedArrays(name, dtype, dims.slice(1), axes.slice(1));
  need(dims.length <= MAX_AXES, '9.1', `${name}: more than ${MAX_AXES} axes`);
  return [{ name, kind: sampled ? 'sampled' : 'constant', dtype, dims, rest: axes.map((axis) => axis.integer('8.1')) }];
}

/** 4.5: 1 to 256 bytes without control characters. */
function isDimension(name) {
  const length = Buffer.byteLength(name);
  return length > 0 && length <= 256 && !/[\u0000-\u001f\u007f-\u009f]/.test(name);
}

/** 14.1: the array of the rows and its two companions. */
function raggedArrays(name, dtype, dims, axes) {
  const rest = axes.map((axis) => axis.integer('14.3'));
  need(name.length <= 120 && !rest.includes(0), '14.1', `${name}: too long a name, or rows of no bytes`);
  return [
    { name, kind: 'ragged', dtype, dims, rest },
    { name: `${name}.crc32c`, kind: 'sampled', dtype: 'uint32', dims: ['sample'], rest: [], companion: true },
    { name: `${name}.offsets`, kind: 'offsets', dtype: 'int64', dims: [`${name}.offsets`], rest: [], companion: true },
  ];
}

function readConstants(value, arrays) {
  const constants = new Map(arrays.filter((a) => a.kind === 'constant').map((a) => [a.name, a]));
  for (const [name, digest] of value.members('8.1')) {
    need(constants.has(name), '8.1', 'constants names what is no constant');
    constants.get(name).sha256 = digest.string('8.1');
    need(hex64(constants.get(name).sha256), '8.1', `${name}: no sha256`);
  }
  for (const a of constants.values()) need(a.sha256, '8.1', `constants lacks ${a.name}`);
}

function readPartition(value) {
  const [k, m] = value.items('8.1', 2).map((item) => item.integer('8.1'));
  need(m !== undefined && k < m && m <= MAX_PARTITIONS, '8.1', 'partition is not [K, M]');
  return [k, m];
}

/** Step 5 of 7.1 for one array: its document (4.4). Notes the shape and what follows from it. */
function readDocument(array, bytes, packed) {
  const document = new Value(checkedText(bytes));
  const fields = document.fields('4.4', ['attributes', 'chunk_grid', 'chunk_key_encoding', 'codecs', 'data_type',
    'dimension_names', 'fill_value', 'node_type', 'shape', 'zarr_format']);
  array.textSize = BigInt(bytes.length);
  array.shape = fields.shape.items('9.1', MAX_AXES).map((axis) => axis.integer('4.4'));
  checkAttributes(array, fields.attributes);
  during(6, () => compareWithIdentity(array, fields));
  measure(array);
  const expected = expectedDocument(array, fields.attributes.raw, packed);
  need(document.raw === expected, '4.4', `${array.name}: the document is not that of its shape, type and dimensions`);
}

/** Step 6 of 7.1 for one array. Done early, for what follows rests on data type, dimensions and shape. */
function compareWithIdentity({ name, kind, dtype, dims, shape, rest }, fields) {
  need(fields.data_type.raw === JSON.stringify(dtype), '8.1', `${name}: another data type than in the identity`);
  need(fields.dimension_names.raw === JSON.stringify(dims), '8.1', `${name}: other dimensions than in the identity`);
  need(shape.length === dims.length, '4.4', `${name}: another number of axes than of dimensions`);
  const found = kind === 'constant' ? shape : shape.slice(1);
  need(String(found) === String(rest), '8.1', `${name}: another shape than in the identity`);
}

/** The caller's attributes don't have the key `ups_store`; that of a ragged array is 14.2's, companions have none. */
function checkAttributes(array, attributes) {
  const own = findMember(attributes, 'ups_store', '4.4');
  if (array.companion) need(attributes.raw === '{}', '14.2', `${array.name}: a companion with attributes`);
  if (array.kind === 'ragged') readRaggedMark(array, own);
  else need(!own, '4.4', `${array.name}: the attributes have the key ups_store`);
}

function readRaggedMark(array, own) {
  const { name, dtype, dims } = array;
  need(own, '14.2', `${name}: the attributes lack ups_store`);
  const mark = own.fields('14.2', ['ragged']).ragged.fields('14.2', ['crc32c', 'offsets'], { optional: ['encoding'] });
  for (const key of ['crc32c', 'offsets']) {
    need(mark[key].raw === `"${name}.${key}"`, '14.2', `${name}: another name of a companion`);
  }
  array.encoding = mark.encoding ? mark.encoding.string('14.2') : null;
  if (array.encoding === null) return;
  need(['utf-8', 'bytes'].includes(array.encoding), '14.2', `${name}: an unknown encoding`);
  need(dtype === 'uint8' && dims.length === 1, '14.2', `${name}: encoded, but not rows of one uint8`);
}

/** Sizes that follow from shape and data type. `s` is the size of one sample (1.4), for ragged arrays that of a row. */
function measure(array) {
  const { shape, kind } = array;
  need(product(shape.map((n) => n || 1)) < MAX_ELEMENTS, '9.1', `${array.name}: 2^60 elements or more`);
  array.itemSize = ITEM_SIZES[array.dtype];
  array.payload = product(shape) * BigInt(array.itemSize);
  array.s = product(kind === 'sampled' || kind === 'ragged' ? shape.slice(1) : shape) * BigInt(array.itemSize);
  array.large = kind === 'sampled' && array.s >= 4096n;
  array.slot = align(array.s + 4n, array.s >= 1048576n ? 4096n : 64n); // 5.3
  if (kind === 'ragged') {
    array.chunkRows = array.s > 65536n ? 1n : 65536n / array.s; // 14.2: R
    array.chunks = (BigInt(shape[0]) + array.chunkRows - 1n) / array.chunkRows;
    need(array.chunks * array.chunkRows < 2n ** 53n, '9.1', `${array.name}: a shard of 2^53 rows or more`);
  }
}

/** The text of 4.4, 13.4 or 14.2. */
function expectedDocument(array, attributes, packed) {
  const { kind, dtype, dims, shape } = array;
  const little = { configuration: { endian: 'little' }, name: 'bytes' };
  const crc = { name: 'crc32c' };
  const bytes = array.itemSize === 1 ? { name: 'bytes' } : little;
  const chain = kind === 'ragged' ? [bytes] : [...(packed ? packedChain(array, bytes, packed) : [bytes]), crc];
  const inner = [kind === 'ragged' ? Number(array.chunkRows) : 1, ...shape.slice(1)];
  const shards = { chunk_shape: inner, codecs: chain, index_codecs: [little, crc], index_location: 'end' };
  const grid = shape.map((n) => n || 1);
  if (kind === 'ragged') grid[0] = Number((array.chunks || 1n) * array.chunkRows);
  const rest = JSON.stringify({
    chunk_grid: { configuration: { chunk_shape: grid }, name: 'regular' },
    chunk_key_encoding: { configuration: { separator: '/' }, name: 'default' },
    codecs: array.large || kind === 'ragged' ? [{ configuration: shards, name: 'sharding_indexed' }] : chain,
    data_type: dtype,
    dimension_names: dims,
    fill_value: dtype === 'bool' ? false : 0,
    node_type: 'array',
    shape,
    zarr_format: 3,
  });
  return `{"attributes":${attributes},${rest.slice(1)}`;
}

/** 13.4: the codecs before `crc32c`. */
function packedChain(array, bytes, { codec, level }) {
  const numeric = !['bool', 'bfloat16'].includes(array.dtype) && array.itemSize > 1;
  if (codec === 'pcodec' && numeric) return [{ configuration: { level }, name: 'numcodecs.pcodec' }];
  const configuration = {
    blocksize: 0,
    clevel: codec === 'pcodec' ? 5 : level,
    cname: 'zstd',
    shuffle: array.itemSize === 1 ? 'noshuffle' : 'shuffle',
    typesize: array.itemSize,
  };
  return [bytes, { configuration, name: 'blosc' }];
}

/** Step 6 of 7.1: what all documents together must satisfy (4.5). Returns N. */
function checkTogether(arrays) {
  const lengths = new Map();
  for (const array of arrays) {
    array.dims.forEach((dim, axis) => {
      const length = array.shape[axis];
      need((lengths.get(dim) ?? length) === length, '4.5', `${array.name}: another length of ${quote(dim)}`);
      lengths.set(dim, length);
    });
  }
  const n = lengths.get('sample') ?? 0;
  const offsets = arrays.filter((a) => a.kind === 'offsets');
  for (const a of offsets) need(a.shape[0] === n + 1, '14.1', `${a.name}: another length than N + 1`);
  const empty = arrays.every((a) => a.kind !== 'sampled' || a.s === 0n);
  need(!empty || n <= MAX_EMPTY_SAMPLES, '9.1', 'more than 2^24 samples, and no byte for any');
  return n;
}

/** Steps 2 to 6 of 7.1. `next(name)` gives the text of the next metadata entry, of that name. */
function readMetadata(next, kind) {
  const bytes = during(2, () => next('zarr.json'));
  const root = readRoot(bytes, kind);
  const { arrays, partition } = during(4, () => readIdentity(root));
  during(5, () => arrays.forEach((array) => readDocument(array, next(`${array.name}/zarr.json`), root.packed)));
  const n = during(6, () => checkTogether(arrays));
  const { minor, requires, packed, configHash } = root;
  return { minor, requires, packed, configHash, partition, arrays, n, rootSize: BigInt(bytes.length) };
}

// ---- records and geometry -------------------------------------------------------------------------------------------

/** A local header (3.3) with its padding (3.4). `entry.header` is its length. */
function localHeader({ name, crc, size, header }) {
  const n = name.length;
  const b = Buffer.alloc(header);
  const extra = header - 30 - n;
  b.write('PK\x03\x04', 0, 'latin1');
  [45, 2048, 0, 0, 33].forEach((value, i) => b.writeUInt16LE(value, 4 + 2 * i));
  b.writeUInt32LE(crc, 14);
  b.fill(255, 18, 26);
  [n, extra].forEach((value, i) => b.writeUInt16LE(value, 26 + 2 * i));
  b.write(name, 30, 'latin1');
  [1, 16].forEach((value, i) => b.writeUInt16LE(value, 30 + n + 2 * i));
  [size, size].forEach((value, i) => b.writeBigUInt64LE(value, 34 + n + 8 * i));
  if (extra > 20) [0xd935, extra - 24, 4096].forEach((value, i) => b.writeUInt16LE(value, 50 + n + 2 * i));
  return b;
}

/** A record of the central directory (3.5). */
function centralRecord({ name, crc, size, offset }) {
  const n = name.length;
  const b = Buffer.alloc(74 + n);
  b.write('PK\x01\x02', 0, 'latin1');
  [813, 45, 2048, 0, 0, 33].forEach((value, i) => b.writeUInt16LE(value, 4 + 2 * i));
  b.writeUInt32LE(crc, 16);
  b.fill(255, 20, 28);
  [n, 28].forEach((value, i) => b.writeUInt16LE(value, 28 + 2 * i));
  b.writeUInt32LE(0o100644 * 65536, 38);
  b.fill(255, 42, 46);
  b.write(name, 46, 'latin1');
  [1, 24].forEach((value, i) => b.writeUInt16LE(value, 46 + n + 2 * i));
  [size, size, offset].forEach((value, i) => b.writeBigUInt64LE(value, 50 + n + 8 * i));
  return b;
}

/** The last 128 bytes (3.6). */
function endRecords(count, size, offset, at) {
  const b = Buffer.alloc(128);
  b.write('PK\x06\x06', 0, 'latin1');
  b.writeBigUInt64LE(44n, 4);
  [813, 45].forEach((value, i) => b.writeUInt16LE(value, 12 + 2 * i));
  [count, count, size, offset].forEach((value, i) => b.writeBigUInt64LE(value, 24 + 8 * i));
  b.write('PK\x06\x07', 56, 'latin1');
  b.writeBigUInt64LE(at, 64);
  b.writeUInt32LE(1, 72);
  b.write('PK\x05\x06', 76, 'latin1');
  b.fill(255, 84, 96);
  b.writeUInt16LE(COMMENT.length, 96);
  COMMENT.copy(b, 98);
  return b;
}

/** The size of the data entry of an array of a mapped store (5.2, 5.4, 14.4). */
function dataSize(array, n) {
  if (array.large) return BigInt(n) * (array.slot + 16n) + 4n;
  if (array.kind === 'ragged') return array.chunks * (array.chunkRows * array.s + 16n) + 4n;
  return array.payload + 4n;
}

/** All entries in order with name, offset, length of the header, begin of the data and size (2.2, 3.4, 13.3). */
function layOut(store, sizeOf) {
  const entries = [];
  let offset = 0n;
  const add = (name, size, array) => {
    const plain = 50 + name.length;
    const base = offset + BigInt(plain);
    const padded = array && !store.packed && base % 4096n !== 0n;
    const data = padded ? align(base + 6n, 4096n) : base;
    entries.push({ name, offset, header: Number(data - offset), data, size, array });
    offset = data + size;
  };
  add('zarr.json', store.rootSize, null);
  for (const array of store.arrays) add(`${array.name}/zarr.json`, array.textSize, null);
  for (const array of store.arrays) {
    if (array.payload > 0n) add(dataKey(array), sizeOf(array, entries), array); // 4.6
  }
  return { entries, end: offset };
}

/** The geometry of a mapped store, a function of its metadata. */
function layOutMapped(store) {
  return layOut(store, (array) => dataSize(array, store.n));
}

const dataKey = (array) => `${array.name}/c${'/0'.repeat(array.shape.length)}`;
const recordsLength = (entries) => entries.reduce((sum, { name }) => sum + 74 + name.length, 0);

// ---- opening a finished store (7.1) ---------------------------------------------------------------------------------

/** Step 1: the end records, and the directory they point to. */
function readDirectory(file) {
  need(file.regular, '7.1', 'not a regular file');
  need(file.size >= 128n && file.size < 2n ** 63n, '7.1', 'shorter than the end records');
  const end = file.read(file.size - 128n, 128);
  const [count, size, offset] = [24, 40, 48].map((at) => end.readBigUInt64LE(at));
  const expected = endRecords(count, size, offset, file.size - 128n);
  need(end.equals(expected), '3.6', 'the last 128 bytes are not the end records');
  need(offset + size === file.size - 128n, '3.6', 'the directory does not end where the end records begin');
  need(size <= MAX_DIRECTORY, '9.1', 'a directory of more than 2 MiB');
  return { count, size, offset, bytes: file.read(offset, Number(size)) };
}

/** Reads metadata entries by the records of the directory, one behind the other (7.1, steps 2 and 5). */
function textsOfDirectory(file, directory) {
  let [at, offset] = [0, 0n];
  return (name) => {
    const record = directory.bytes.subarray(at, at + 74 + name.length);
    need(record.length === 74 + name.length, '3.5', `the directory has no record of ${name}`);
    const [crc, size] = [record.readUInt32LE(16), record.readBigUInt64LE(50 + name.length)];
    need(record.equals(centralRecord({ name, crc, size, offset })), '3.5', `the record of ${name} is another one`);
    const data = offset + BigInt(50 + name.length);
    need(size <= MAX_TEXT, '9.1', `${name} has more than 16 MiB`);
    need(data + size <= directory.offset, '7.1', `${name} does not end before the directory`);
    need(data + size <= MAX_METADATA, '9.1', `${name} ends behind the first 64 MiB`);
    const bytes = file.read(data, Number(size));
    need(crc32(bytes) === crc, '3.2', `${name}: another CRC-32`);
    [at, offset] = [at + record.length, data + size];
    return bytes;
  };
}

/** Step 7: the geometry and the directory that follows from it; for packed stores 13.6. */
function checkGeometry(store, directory) {
  const { entries, end } = store.packed ? layOutPacked(store, directory) : layOutMapped(store);
  const length = recordsLength(entries);
  const newer = store.minor > 0; // 10.3: entries may follow
  const fits = (found, computed) => (newer ? found >= computed : found === computed);
  need(fits(directory.offset, end), '2.2', `the directory begins at ${directory.offset}, not at ${end}`);
  need(fits(directory.size, BigInt(length)), '2.2', `the directory has ${directory.size} bytes, not ${length}`);
  const count = entries.length;
  need(fits(directory.count, BigInt(count)), '2.2', `there are ${directory.count} entries, not ${count}`);
  let at = 0;
  for (const entry of entries) {
    entry.crc = directory.bytes.readUInt32LE(at + 16);
    const record = centralRecord(entry);
    const found = directory.bytes.subarray(at, at + record.length);
    need(record.equals(found), '3.5', `the record of ${entry.name} is another one`);
    at += record.length;
  }
  return entries;
}

/** 13.6: the geometry of a packed store takes the sizes of data entries from their records. */
function layOutPacked(store, directory) {
  for (const a of store.arrays) {
    need((a.large ? a.s : a.payload) <= MAX_PACKED_PAYLOAD, '13.8', `${a.name}: too long a payload for a packed chunk`);
  }
  return layOut(store, (array, before) => {
    const at = recordsLength(before) + 50 + dataKey(array).length;
    need(at + 8 <= directory.bytes.length, '3.5', `the directory has no record of ${dataKey(array)}`);
    const size = directory.bytes.readBigUInt64LE(at);
    need(size >= (array.large ? 21n * BigInt(store.n) + 4n : 5n), '13.6', `${array.name}: an entry of too few bytes`);
    return size;
  });
}

function openFile(file, { kind = null } = {}) {
  const directory = during(1, () => readDirectory(file));
  const store = readMetadata(textsOfDirectory(file, directory), kind);
  store.entries = during(7, () => checkGeometry(store, directory));
  store.file = file;
  for (const entry of store.entries) if (entry.array) entry.array.entry = entry;
  return store;
}

/** Runs `work` with the open file and closes it. */
export function withFile(name, work) {
  const file = new File(name);
  try {
    return work(file);
  } finally {
    file.close();
  }
}

/** Opens a finished store: its arrays, entries and N. `kind` is 'mapped' or 'packed'. The caller closes `store.file`. */
export function openStore(name, options = {}) {
  const file = new File(name);
  try {
    return openFile(file, options);
  } catch (error) {
    file.close();
    throw error;
  }
}

/** 8.5. Of a newer minor version the entries that follow are unknown here, so there is none. */
export function fingerprint({ minor, configHash, entries }) {
  return minor > 0 ? null : sha256(JSON.stringify([configHash, ...entries.map((entry) => entry.crc)]));
}

/** Where sample i of an array lies in a mapped store (5.5, 5.6, 14.4): `{offset, length}`. */
export function sampleRange(store, name, i) {
  const array = store.arrays.find((a) => a.name === name);
  if (array?.kind === 'ragged') return raggedRange(store, array, i);
  if (array?.kind !== 'sampled' || store.packed || !(i >= 0 && i < store.n)) throw new RangeError('no such sample');
  const step = array.large ? array.slot : array.s;
  return { offset: (array.entry?.data ?? 0n) + BigInt(i) * step, length: array.s };
}

function raggedRange(store, array, i) {
  if (!(i >= 0 && i < store.n)) throw new RangeError('no such sample');
  const offsets = store.arrays.find((a) => a.name === `${array.name}.offsets`).entry;
  const two = store.file.read(offsets.data + 8n * BigInt(i), 16);
  const [from, to] = [two.readBigInt64LE(0), two.readBigInt64LE(8)];
  need(from >= 0n && from <= to && to <= BigInt(array.shape[0]), '14.5', `${array.name}: offsets of sample ${i}`);
  return { offset: (array.entry?.data ?? 0n) + from * array.s, length: (to - from) * array.s };
}

// ---- verifying (7.6, 13.9, 14.5) ------------------------------------------------------------------------------------

/** Gathers what was found, one line per clause and entry: the first case in words and how many there are. */
class Findings {
  constructor() {
    this.found = new Map();
  }

  add(clause, entry, what) {
    const key = `${clause} ${entry}`;
    const finding = this.found.get(key) ?? { clause, entry, first: what, count: 0 };
    finding.count++;
    this.found.set(key, finding);
  }

  answer() {
    const found = [...this.found.values()];
    if (!found.length) return { verify: 'ok' };
    return { verify: [...new Set(found.map((finding) => finding.clause))].sort(byClause), findings: found };
  }
}

/** The order of clauses: 3.3, 5.2, 14.5. */
function byClause(a, b) {
  const [[a1, a2], [b1, b2]] = [a, b].map((clause) => clause.split('.').map(Number));
  return a1 - b1 || a2 - b2;
}

const notZero = (piece) => piece.some((byte) => byte !== 0);
const notBool = (piece) => piece.some((byte) => byte > 1);

/** A sink that reports a clause once if a piece fails the test. */
function watch(test, report) {
  let seen = false;
  return (piece) => {
    if (seen || !test(piece)) return;
    seen = true;
    report();
  };
}

/** Sinks for the payload of an array: beside those given, one that watches over `bool` (4.7). */
function payloadSinks(array, findings, ...others) {
  if (array.dtype !== 'bool') return others;
  return [...others, watch(notBool, () => findings.add('4.7', array.name, 'a byte that is neither 0 nor 1'))];
}

/** Opens and verifies. The store is refused, or the answer lists the clauses that do not hold. */
export function verifyFile(file, options) {
  const store = openFile(file, options);
  need(store.minor === 0, '10.3', 'a newer minor version can be read, not verified');
  const findings = new Findings();
  for (const entry of store.entries) {
    const header = file.read(entry.offset, entry.header);
    if (!header.equals(localHeader(entry))) findings.add('3.3', entry.name, 'another local header');
    if (!entry.array) verifyNumbers(file, entry, findings);
    else verifyData(store, entry, findings);
  }
  for (const array of store.arrays) {
    if (array.kind === 'ragged') verifyRagged(store, array, findings);
    if (!array.entry && array.sha256 && array.sha256 !== sha256('')) findings.add('8.1', array.name, 'another sha256');
  }
  return { ...findings.answer(), ...(store.packed && { not_checked: 'what decoding would tell' }) };
}

/** 4.1: that numbers have the digits of RFC 8785, which are those of ECMAScript. */
function verifyNumbers(file, entry, findings) {
  checkedText(file.read(entry.data, Number(entry.size)), (token) => {
    if (String(Number(token)) !== token) findings.add('4.1', entry.name, `the number ${token.slice(0, 40)}`);
  });
}

function verifyData(store, entry, findings) {
  const { array } = entry;
  const stream = new Stream(store.file, entry.data, entry.data + entry.size, { checksum: true });
  if (store.packed && array.large) verifyPackedShard(store, entry, stream, findings);
  else if (store.packed) verifyChunk(stream, array, entry.size - 4n, [], findings);
  else if (array.large) verifySlots(store, array, stream, findings);
  else if (array.kind !== 'ragged') verifyPlain(array, stream, findings);
  stream.drain();
  if (stream.crc !== entry.crc) findings.add('3.2', entry.name, 'another CRC-32');
}

/** A chunk: `length` bytes and their CRC-32C (5.2). */
function verifyChunk(stream, array, length, sinks, findings, what = 'the chunk') {
  const sum = running(crc32c);
  stream.take(length, sum.add, ...sinks);
  if (stream.bytes(4).readUInt32LE(0) !== sum.value) findings.add('5.2', array.name, `${what} has another CRC-32C`);
}

/** A small array, a constant, the offsets of a ragged array (5.6). */
function verifyPlain(array, stream, findings) {
  const hash = createHash('sha256');
  const sinks = array.sha256 ? [(piece) => hash.update(piece)] : [];
  verifyChunk(stream, array, array.payload, payloadSinks(array, findings, ...sinks), findings);
  if (array.sha256 && hash.digest('hex') !== array.sha256) findings.add('8.1', array.name, 'another sha256');
}

/** The slots of a large array and their index (5.3, 5.4). */
function verifySlots(store, array, stream, findings) {
  for (let i = 0; i < store.n; i++) {
    verifyChunk(stream, array, array.s, payloadSinks(array, findings), findings, `the chunk of sample ${i}`);
    const padding = watch(notZero, () => findings.add('5.3', array.name, `padding behind sample ${i}`));
    stream.take(array.slot - array.s - 4n, padding);
  }
  verifyIndex(stream, array, BigInt(store.n), array.slot, array.s + 4n, findings);
}

/** The index of a shard of `count` chunks of `size` bytes, one every `step` bytes (5.4, 14.4), with its CRC-32C. */
function verifyIndex(stream, array, count, step, size, findings) {
  const sum = running(crc32c);
  let right = true;
  for (let i = 0n; i < count; i++) {
    const pair = stream.bytes(16);
    sum.add(pair);
    right &&= pair.readBigUInt64LE(0) === i * step && pair.readBigUInt64LE(8) === size;
  }
  right &&= stream.bytes(4).readUInt32LE(0) === sum.value;
  if (!right) findings.add('5.4', array.name, 'another shard index');
}

/** A shard of a packed store (13.5, 13.6): the index first, then, if it is right, the chunks that it describes. */
function verifyPackedShard(store, entry, stream, findings) {
  const { array } = entry;
  const index = entry.data + entry.size - 16n * BigInt(store.n) - 4n;
  if (!packedIndexHolds(store, entry, index)) {
    findings.add('5.4', array.name, 'a shard index that does not hold');
    return;
  }
  const pairs = new Stream(store.file, index, entry.data + entry.size);
  for (let i = 0; i < store.n; i++) {
    verifyChunk(stream, array, pairs.bytes(16).readBigUInt64LE(8) - 4n, [], findings, `the chunk of sample ${i}`);
  }
}

function packedIndexHolds(store, entry, index) {
  const pairs = new Stream(store.file, index, entry.data + entry.size);
  const sum = running(crc32c);
  let next = 0n;
  for (let i = 0; i < store.n; i++) {
    const pair = pairs.bytes(16);
    sum.add(pair);
    if (pair.readBigUInt64LE(0) !== next || pair.readBigUInt64LE(8) <= 4n) return false;
    next += pair.readBigUInt64LE(8);
  }
  return next === index - entry.data && pairs.bytes(4).readUInt32LE(0) === sum.value;
}

/** The companions of a ragged array, and streams over the payloads of each. */
function companionStreams(store, array) {
  const streamOf = (suffix) => {
    const companion = store.arrays.find((a) => a.name === `${array.name}.${suffix}`);
    const start = companion.entry?.data ?? 0n; // with N = 0 the checksums have no entry
    return new Stream(store.file, start, start + companion.payload);
  };
  return { offsets: streamOf('offsets'), checksums: streamOf('crc32c') };
}

/** 14.5: the offsets begin with 0, never fall and end with M. */
function offsetsHold(store, array) {
  const { offsets } = companionStreams(store, array);
  let last = 0n;
  for (let i = 0; i <= store.n; i++) {
    const next = offsets.bytes(8).readBigInt64LE(0);
    if (i === 0 ? next !== 0n : next < last) return false;
    last = next;
  }
  return last === BigInt(array.shape[0]);
}

/** A ragged array (14.5). If there are no rows it has no entry, but its offsets and checksums are checked. */
function verifyRagged(store, array, findings) {
  const { entry } = array;
  const stream = new Stream(store.file, entry?.data ?? 0n, entry ? entry.data + entry.size : 0n);
  if (offsetsHold(store, array)) verifyRaggedSamples(store, array, stream, findings);
  else {
    findings.add('14.5', array.name, 'offsets');
    stream.take(array.payload, ...payloadSinks(array, findings));
  }
  if (!entry) return;
  const chunk = array.chunkRows * array.s;
  stream.take(array.chunks * chunk - array.payload, watch(notZero, () => findings.add('14.5', array.name, 'fill')));
  verifyIndex(stream, array, array.chunks, chunk, chunk, findings);
}

function verifyRaggedSamples(store, array, stream, findings) {
  const { offsets, checksums } = companionStreams(store, array);
  let from = offsets.bytes(8).readBigInt64LE(0);
  for (let i = 0; i < store.n; i++) {
    const to = offsets.bytes(8).readBigInt64LE(0);
    const sum = running(crc32c);
    const text = array.encoding === 'utf-8' ? utf8Watch() : null;
    stream.take((to - from) * array.s, ...payloadSinks(array, findings, sum.add, ...(text ? [text.add] : [])));
    const wanted = checksums.bytes(4).readUInt32LE(0);
    if (sum.value !== wanted) findings.add('14.5', array.name, `sample ${i} has another CRC-32C`);
    if (text && !text.isText()) findings.add('14.5', array.name, `sample ${i} is not UTF-8`);
    from = to;
  }
}

/** Says of pieces of bytes whether they are UTF-8 together. */
function utf8Watch() {
  const decoder = new TextDecoder('utf-8', { fatal: true });
  let good = true;
  const attempt = (...args) => {
    try {
      if (good) decoder.decode(...args);
    } catch {
      good = false;
    }
  };
  return { add: (piece) => attempt(piece, { stream: true }), isText: () => { attempt(); return good; } };
}

// ---- digests --------------------------------------------------------------------------------------------------------

/** Hands the payload of an array to the sinks, in C order (5.5, 5.6, 14.4). */
function readPayload(store, array, ...sinks) {
  if (!array.entry) return;
  const stream = new Stream(store.file, array.entry.data, array.entry.data + array.entry.size);
  if (!array.large) return void stream.take(array.payload, ...sinks);
  for (let i = 0; i < store.n; i++) {
    stream.take(array.s, ...sinks);
    stream.take(array.slot - array.s);
  }
}

function payloadDigest(store, array) {
  const hash = createHash('sha256');
  readPayload(store, array, (piece) => hash.update(piece));
  return hash.digest('hex');
}

function sampleDigest(store, name, i) {
  const { offset, length } = sampleRange(store, name, i);
  const hash = createHash('sha256');
  new Stream(store.file, offset, offset + length).drain((piece) => hash.update(piece));
  return hash.digest('hex');
}

/** Per array its shape, data type and the sha256 of its payload, of ragged ones that of each sample, too. */
export function digestFile(file, options) {
  const store = openFile(file, options);
  const arrays = Object.create(null);
  for (const array of store.arrays) {
    const digest = { shape: array.shape, dtype: array.dtype };
    digest.sha256 = store.packed ? null : payloadDigest(store, array);
    if (array.kind === 'ragged' && store.n <= MAX_LISTED) {
      digest.samples = Array.from({ length: store.n }, (_, i) => sampleDigest(store, array.name, i));
    }
    arrays[array.name] = digest;
  }
  return { ...describe(store), arrays };
}

function describe(store) {
  const { n, configHash, partition, packed } = store;
  return {
    open: 'ok', kind: packed ? 'packed' : 'mapped', version: `1.${store.minor}`, samples: n, config_hash: configHash,
    fingerprint: fingerprint(store), ...(partition && { partition }), ...(packed && { packed }),
  };
}

// ---- building files (6.5) -------------------------------------------------------------------------------------------

/** Reads metadata entries of a building file by their local headers; a central directory isn't there yet. */
function textsOfHeaders(file) {
  let offset = 0n;
  return (name) => {
    const header = 50 + name.length;
    const found = file.read(offset, header);
    const size = found.readBigUInt64LE(34 + name.length);
    need(size <= MAX_TEXT, '9.1', `${name} has more than 16 MiB`);
    need(offset + BigInt(header) + size <= MAX_METADATA, '9.1', `${name} ends behind the first 64 MiB`);
    const bytes = file.read(offset + BigInt(header), Number(size));
    need(found.equals(localHeader({ name, size, header, crc: crc32(bytes) })), '3.3', `${name}: another local header`);
    offset += BigInt(header) + size;
    return bytes;
  };
}

/** The places in a building file (6.1, 6.4). The commit table has the arrays with samples, ragged ones too (14.6). */
function buildingGeometry(store) {
  const { entries, end } = layOutMapped(store);
  for (const entry of entries) if (entry.array) entry.array.entry = entry;
  const table = store.arrays.filter((a) => a.kind === 'sampled' || a.kind === 'ragged');
  const length = end + BigInt(recordsLength(entries)) + 128n; // F
  const tail = align(length, 4096n);
  const recordSize = 4 * (table.length + 2);
  const whole = align(tail + 4096n + BigInt(store.n) * BigInt(recordSize), 4096n);
  return { entries, table, length, tail, recordSize, whole };
}

/** The tail header (6.2) of a geometry, with build id, boot id and flag of the one found. */
function tailHeader(store, geometry, found) {
  const b = Buffer.alloc(128);
  b.write('UPSBUILD', 0, 'latin1');
  b.writeUInt16LE(1, 8);
  b.writeUInt16LE(found[10] & 1, 10);
  b.writeUInt32LE(geometry.table.length, 12);
  found.copy(b, 16, 16, 48);
  b.writeBigUInt64LE(BigInt(store.n), 48);
  b.writeBigUInt64LE(geometry.length, 56);
  b.writeUInt32LE(crc32c(b.subarray(0, 124)), 124);
  return b;
}

/** The boot id of this machine as 16 bytes, zeros if nobody knows it. */
function presentBootId(text) {
  try {
    const digits = (text ?? fs.readFileSync('/proc/sys/kernel/random/boot_id', 'latin1')).replace(/[-\s]/g, '');
    if (/^[0-9a-fA-F]{32}$/.test(digits)) return Buffer.from(digits, 'hex');
  } catch { /* unknown, as below */ }
  return Buffer.alloc(16);
}

const ranges = (n) => (n > 0 ? [[0, n]] : []);

/** 6.5, finished: 7.1 holds. Null if it doesn't. */
function finishedStore(file) {
  try {
    return openFile(file, { kind: 'mapped' });
  } catch (error) {
    if (error instanceof Refusal) return null;
    throw error;
  }
}

/** Classifies a building file and says which samples are committed, as ranges [from, to). */
export function readBuilding(file, { bootId = null } = {}) {
  need(file.regular && file.size < 2n ** 62n, '6.5', 'not a regular file of less than 2^62 bytes');
  const finished = finishedStore(file);
  if (finished) return { open: 'ok', state: 'finished', samples: finished.n, config_hash: finished.configHash, committed: ranges(finished.n) };
  const store = readMetadata(textsOfHeaders(file), 'mapped');
  need(store.minor === 0, '10.3', 'the geometry of a newer minor version is unknown');
  Object.assign(store, { file });
  const geometry = buildingGeometry(store);
  need(geometry.whole < 2n ** 62n, '9.1', 'the building file would have 2^62 bytes or more');
  const answer = { open: 'ok', samples: store.n, config_hash: store.configHash };
  need(file.size === geometry.whole, '6.5', 'neither the length of 6.1 nor F');
  const found = file.read(geometry.tail, 128);
  if (!found.equals(tailHeader(store, geometry, found))) return { ...answer, open: 'refused', state: 'headless', committed: [] };
  const [boot, present] = [found.subarray(32, 48), presentBootId(bootId)];
  const doubtful = (found[10] & 1) === 1 && (!boot.equals(present) || !notZero(boot));
  answer.state = doubtful ? 'resumable, lazy, of another boot' : 'resumable';
  const committed = committedRanges(store, geometry, found.subarray(16, 32), doubtful);
  return { ...answer, lazy: (found[10] & 1) === 1, committed };
}

/** 6.4: the samples whose record checks, where in doubt those whose bytes are the recorded ones, too. */
function committedRanges(store, { table, tail, recordSize }, buildId, doubtful) {
  const ranges = [];
  const start = tail + 4096n;
  const records = new Stream(store.file, start, start + BigInt(store.n) * BigInt(recordSize));
  for (let i = 0; i < store.n; i++) {
    const record = records.bytes(recordSize);
    if (!recordChecks(record, buildId, i) || !extentsHold(store, table, i)) continue;
    if (doubtful && !bytesAreRecorded(store, table, record, i)) continue;
    if (ranges.at(-1)?.[1] === i) ranges.at(-1)[1] = i + 1;
    else ranges.push([i, i + 1]);
  }
  return ranges;
}

function recordChecks(record, buildId, i) {
  const number = Buffer.alloc(8);
  number.writeBigUInt64LE(BigInt(i));
  const end = record.length - 4;
  const sum = crc32c(record.subarray(0, end), crc32c(number, crc32c(buildId)));
  return record.toString('latin1', 0, 4) === 'CMIT' && record.readUInt32LE(end) === sum;
}

/** 6.5: whether the offsets of a sample are possible ones in every ragged array (14.5). */
function extentsHold(store, table, i) {
  return table.every((array) => {
    try {
      if (array.kind === 'ragged') raggedRange(store, array, i);
      return true;
    } catch (error) {
      if (error instanceof Refusal && error.clause === '14.5') return false;
      throw error;
    }
  });
}

/** 6.5: whether a sample's bytes are the recorded ones. */
function bytesAreRecorded(store, table, record, i) {
  return table.every((array, k) => {
    const { offset, length } = sampleRange(store, array.name, i);
    const sum = running(crc32);
    new Stream(store.file, offset, offset + (array.large ? array.slot : length)).drain(sum.add);
    return sum.value === record.readUInt32LE(4 + 4 * k);
  });
}

// ---- command line ---------------------------------------------------------------------------------------------------

/** Answers a question about a file. A refusal is an answer; so is that the file can't be read. */
function answer(question, name, work) {
  try {
    return withFile(name, work);
  } catch (error) {
    if (error instanceof Refusal) return error.answer(question);
    return { [question]: 'refused', clause: null, why: error.code ? error.message : `${error.name}: ${error.message}` };
  }
}

const answerOpen = (name, options) => answer('open', name, (file) => describe(openFile(file, options)));
const answerVerify = (name, options) => answer('verify', name, (file) => verifyFile(file, options));
const answerDigest = (name, options) => answer('open', name, (file) => digestFile(file, options));

function answerBuilding(name, options) {
  const result = answer('open', name, (file) => readBuilding(file, options));
  return result.clause ? { ...result, state: 'foreign or damaged' } : result;
}

const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

/** Compares a file with what the corpus expects of it; returns lines of disagreement. */
function disagreements(folder, expected) {
  const lines = [];
  const name = path.join(folder, expected.file);
  const compare = (what, wanted, got, result) => {
    if (wanted === undefined || same(wanted, got)) return;
    const [is, should, full] = [got, wanted, result].map((value) => JSON.stringify(value));
    lines.push(`${expected.file}: ${what} is ${is}, expected ${should}: ${full}`);
  };
  if (expected.kind === 'building') {
    const result = answerBuilding(name, { bootId: expected.boot_id });
    for (const key of ['open', 'state', 'committed']) compare(key, expected[key], result[key], result);
    return lines;
  }
  const options = { kind: expected.kind };
  const opened = answerOpen(name, options);
  for (const key of ['open', 'fingerprint']) compare(key, expected[key], opened[key], opened);
  if (expected.needs) return lines; // the answer takes decoding with a codec that isn't here
  const verified = expected.verify === undefined ? {} : answerVerify(name, options);
  const clauses = Array.isArray(expected.verify) ? [...new Set(expected.verify)].sort(byClause) : expected.verify;
  const may = expected.may ?? [];
  const found = Array.isArray(verified.verify) ? verified.verify.filter((clause) => !may.includes(clause)) : verified.verify;
  compare('verify', clauses, found, verified);
  const digests = expected.digests ? answerDigest(name, options).arrays ?? {} : {};
  for (const [array, wanted] of Object.entries(expected.digests ?? {})) {
    if (expected.kind !== 'packed') compareDigest(array, wanted, digests[array] ?? {}, compare);
  }
  return lines;
}

/** A digest in the corpus: the sha256 of the payload, a list of those of the samples, or an object as `digest` prints. */
function compareDigest(array, wanted, got, compare) {
  if (typeof wanted === 'string') compare(`sha256 of ${array}`, wanted, got.sha256, got);
  else if (Array.isArray(wanted)) compare(`samples of ${array}`, wanted, got.samples, got);
  else for (const key of Object.keys(wanted)) compare(`${key} of ${array}`, wanted[key], got[key], got);
}

function runCorpus(folder) {
  const { files } = JSON.parse(fs.readFileSync(path.join(folder, 'corpus.json'), 'utf8'));
  let bad = 0;
  for (const expected of files) {
    for (const line of disagreements(folder, expected)) {
      console.log(line);
      bad++;
    }
  }
  console.log(`${files.length} files, ${bad} disagreements`);
  return bad ? 1 : 0;
}

const COMMANDS = {
  open: (name, options) => answerOpen(name, options),
  verify: (name, options) => answerVerify(name, options),
  digest: (name, options) => answerDigest(name, options),
  building: (name, options) => answerBuilding(name, options),
};

const USAGE = `usage: reader.mjs open|verify|digest FILE [--kind=mapped|packed]
       reader.mjs building FILE [--boot-id=HEX]
       reader.mjs corpus FOLDER`;

function main([command, name, ...rest]) {
  if (command === 'corpus' && name) return runCorpus(name);
  const matches = rest.map((word) => /^--(kind|boot-id)=(.*)$/.exec(word));
  if (!Object.hasOwn(COMMANDS, command ?? '') || !name || matches.includes(null)) {
    console.error(USAGE);
    return 2;
  }
  const options = Object.fromEntries(matches.map((match) => [match[1], match[2]]));
  const result = COMMANDS[command](name, { kind: options.kind, bootId: options['boot-id'] });
  console.log(JSON.stringify(result, null, 1));
  return result.open === 'ok' || result.verify === 'ok' ? 0 : 1;
}

if (process.argv[1] && import.meta.url === pathToFileURL(fs.realpathSync(process.argv[1])).href) {
  try {
    process.exitCode = main(process.argv.slice(2));
  } catch (error) {
    console.log(JSON.stringify({ error: error.message }));
    process.exitCode = 2;
  }
}

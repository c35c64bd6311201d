// Answers requests with zarrita.js, as peers.py describes: `node read_zarrita.mjs STORE REQUESTS OUT`.
import { openAsBlob } from "node:fs";
import { readFile, writeFile } from "node:fs/promises";
import path from "node:path";
import ZipFileStore from "@zarrita/storage/zip";
import * as zarr from "zarrita";

const [storePath, requestsPath, out] = process.argv.slice(2);
const store = ZipFileStore.fromBlob(await openAsBlob(storePath));
const root = await zarr.open.v3(store, { kind: "group" });

async function read({ array: name, first }) {
  const array = await zarr.open.v3(root.resolve(name), { kind: "array" });
  if (array.shape.length === 0) return await array.getChunk([]); // `get` would return a bare number
  const rows = first === null ? null : zarr.slice(first, null);
  return await zarr.get(array, [rows, ...array.shape.slice(1).fill(null)]); // needs every axis
}

const answers = [];
for (const [i, request] of JSON.parse(await readFile(requestsPath, "utf8")).entries()) {
  try {
    const { data, shape } = await read(request);
    await writeFile(path.join(out, `${i}.bin`), new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
    answers.push({ shape });
  } catch (error) {
    answers.push({ error: `${error.name}: ${error.message}` });
  }
}
await writeFile(path.join(out, "answers.json"), JSON.stringify(answers));

// Trains one table over gRPC, from proto/embershard.proto and docs/wire.md alone: a client without any code of embershard.
//   npm install @grpc/grpc-js @grpc/proto-loader blakejs
//   node examples/client.js HOST:PORT ...     (all shards, in any order)
const grpc = require("@grpc/grpc-js"), loader = require("@grpc/proto-loader"), blake = require("blakejs");
const fs = require("fs"), os = require("os"), path = require("path");

const definition = loader.loadSync(path.join(__dirname, "../proto/embershard.proto"), {keepCase: true, longs: String});
const {Shard} = grpc.loadPackageDefinition(definition).embershard.v2;
const call = (shard, method, request) => new Promise((done, failed) => shard[method](
  request, shard.shown, {deadline: Date.now() + 20000}, (error, reply) => error ? failed(error) : done(reply)));

// docs/wire.md, "Tokens": EMBERSHARD_TOKEN_FILE, or the one of this user's own shard at ip:port of loopback
function metadataFor(address) {
  const uid = os.userInfo().uid, folders = [`/run/user/${uid}/embershard`, `/tmp/embershard-${uid}`];
  const found = folders.map(folder => `${folder}/${address}.token`).find(fs.existsSync);
  const file = process.env.EMBERSHARD_TOKEN_FILE || found, metadata = new grpc.Metadata();
  if (file) metadata.set("authorization", `Bearer ${fs.readFileSync(file, "utf8").split("\n")[0].trim()}`);
  return metadata;
}

// Arrays travel as bytes: int64 and float32, little endian.
const int64s = ids => Buffer.from(BigInt64Array.from(ids).buffer);
const float32s = values => Buffer.from(Float32Array.from(values).buffer);
const floatsOf = bytes => new Float32Array(new Uint8Array(bytes).buffer);

// docs/wire.md, "Which shard has an id"
const U64 = 2n ** 64n;
const keyOf = space => Buffer.from(blake.blake2b(Buffer.from(space), null, 8)).readBigUInt64LE();
function mix64(z) {
  z = (z ^ z >> 30n) * 0xbf58476d1ce4e5b9n % U64;
  z = (z ^ z >> 27n) * 0x94d049bb133111ebn % U64;
  return z ^ z >> 31n;
}
const shardOf = (id, key, count) => Number(mix64(BigInt.asUintN(64, id) ^ key) >> 52n) * count >> 12;

async function main(addresses) {
  const table = "node", dim = 2, lr = 0.1, worker = 7, epoch = BigInt(Date.now()) * 1000000n;
  const shards = [];
  for (const address of addresses) {
    const shard = Object.assign(new Shard(address, grpc.credentials.createInsecure()), {shown: metadataFor(address)});
    const greeting = await call(shard, "Hello", {worker});
    if (greeting.num_shards !== addresses.length) throw new Error(`name all ${greeting.num_shards} shards`);
    shards[greeting.shard || 0] = {shard, placement_epoch: greeting.placement_epoch, seq: 0};
  }
  const spec = {
    name: table, dim,
    optimizer: {name: "adagrad", settings: [{name: "lr", value: lr}]},
    initializer: {kind: "constant", params: {value: 1}},
  };
  for (const {shard} of shards) await call(shard, "Declare", {spec, worker});

  const ids = Array.from({length: 100}, (_, i) => BigInt(i - 50)), key = keyOf(table);
  const parts = shards.map((_, s) => ids.filter(id => shardOf(id, key, shards.length) === s));
  const gradient = step => [0.5 * step, -2];

  for (let step = 1; step <= 3; step++)
    for (const [s, to] of shards.entries()) {
      const seq = ++to.seq;  // this client waits for every push: none below it is open
      const pushed = await call(to.shard, "Push", {
        worker, epoch: String(epoch), seq, first_incomplete: seq, clock: step, placement_epoch: to.placement_epoch, last: true,
        tables: [{table, ids: int64s(parts[s]), gradients: float32s(parts[s].flatMap(() => gradient(step)))}],
      });
      if (Number(pushed.applied) !== parts[s].length) throw new Error(`shard ${s} applied ${pushed.applied} rows`);
    }

  const want = [1, 1], squares = [0, 0];  // Adagrad, by hand
  for (let step = 1; step <= 3; step++)
    gradient(step).forEach((g, j) => { squares[j] += g * g; want[j] -= lr * g / (Math.sqrt(squares[j]) + 1e-10); });
  let worst = 0;
  for (const [s, {shard, placement_epoch}] of shards.entries()) {
    const rows = await call(shard, "Pull", {placement_epoch, worker, tables: [{table, ids: int64s(parts[s])}]});
    floatsOf(rows.tables[0]).forEach((x, i) => { worst = Math.max(worst, Math.abs(x - want[i % dim])); });
    shard.close();
  }
  console.log(JSON.stringify({shards: parts.map(part => part.length), want, worst}));
  if (!(worst < 1e-5)) throw new Error("the rows differ from Adagrad's");
}

main(process.argv.slice(2)).catch(error => { console.error(error.details || error); process.exit(1); });

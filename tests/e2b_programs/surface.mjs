// An E2B program in JavaScript, run in a folder where the SDK is installed.
import assert from 'node:assert/strict'
import http from 'node:http'
import { createRequire } from 'node:module'

const require = createRequire(process.cwd() + '/')
const { Sandbox, CommandExitError, NotFoundError, SandboxError, FilesystemEventType } = require('e2b')

async function until(check) {
  const deadline = Date.now() + 60_000
  for (;;) {
    const found = await check()
    if (found) return found
    assert.ok(Date.now() < deadline, String(check))
    await new Promise((done) => setTimeout(done, 50))
  }
}

async function commands(sbx) {
  const done = await sbx.commands.run('echo hi; echo $FOO; pwd; echo bad >&2')
  assert.equal(done.stdout, 'hi\n1\n/home/user\n')
  assert.equal(done.stderr, 'bad\n')
  await assert.rejects(sbx.commands.run('exit 3'), (error) => error instanceof CommandExitError && error.exitCode === 3)
  await assert.rejects(sbx.commands.run('sleep 300', { timeoutMs: 1000 }), /timeout|timed out|deadline/i)
  const background = await sbx.commands.run('sleep 300', { background: true })
  assert.ok((await sbx.commands.list()).some((one) => one.pid === background.pid))
  assert.equal(await sbx.commands.kill(background.pid), true)
  assert.equal(await sbx.commands.kill(background.pid), false)
  const fed = await sbx.commands.run('read line; echo got $line', { background: true, stdin: true })
  await sbx.commands.sendStdin(fed.pid, 'this\n')
  assert.equal((await fed.wait()).stdout, 'got this\n')
  const big = await sbx.commands.run("head -c 3000000 /dev/zero | tr '\\0' x")
  assert.equal(big.stdout.length, 3000000)
}

async function files(sbx) {
  await sbx.files.write('a/b.txt', 'text')
  assert.equal(await sbx.files.read('a/b.txt'), 'text')
  const bytes = new Uint8Array(1 << 20).map((_, at) => at * 7)
  await sbx.files.write('a/big', bytes.buffer)
  assert.deepEqual(await sbx.files.read('a/big', { format: 'bytes' }), bytes)
  await sbx.files.write([{ path: 'm/1', data: 'x' }, { path: 'm/2', data: 'y' }])
  assert.deepEqual((await sbx.files.list('m')).map((one) => one.name), ['1', '2'])
  await assert.rejects(sbx.files.read('none'), NotFoundError)
  assert.equal(await sbx.files.makeDir('d'), true)
  assert.equal(await sbx.files.makeDir('d'), false)
  assert.equal((await sbx.files.rename('m/1', 'd/one')).path, '/home/user/d/one')
  assert.equal(await sbx.files.exists('m/1'), false)
  const info = await sbx.files.getInfo('d/one')
  assert.equal(info.permissions, '-rw-r--r--')
  await sbx.files.remove('d')
  const seen = []
  const watch = await sbx.files.watchDir('a', (event) => seen.push([event.name, event.type]))
  await sbx.files.write('a/new', '1')
  await until(() => seen.length >= 3)
  assert.deepEqual(seen, [['new', FilesystemEventType.CREATE], ['new', FilesystemEventType.CHMOD], ['new', FilesystemEventType.WRITE]])
  await watch.stop()
  const url = await sbx.downloadUrl('a/b.txt', { useSignatureExpiration: 100 })
  assert.equal(await (await fetch(url)).text(), 'text')
}

async function terminal(sbx) {
  let shown = ''
  const pty = await sbx.pty.create({ cols: 80, rows: 24, onData: (data) => { shown += new TextDecoder().decode(data) } })
  await sbx.pty.resize(pty.pid, { cols: 101, rows: 24 })
  await sbx.pty.sendInput(pty.pid, new TextEncoder().encode('echo at=$(tput cols); exit\n'))
  await pty.wait()
  assert.match(shown, /at=101/)
}

async function more(sbx) {
  const left = await sbx.commands.run('while [ ! -e go ]; do sleep 0.1; done; exit 5', { background: true })
  await left.disconnect()
  assert.ok((await sbx.commands.list()).some((one) => one.pid === left.pid))
  await sbx.files.write('go', '')
  await until(async () => !(await sbx.commands.list()).some((one) => one.pid === left.pid))
  const again = await sbx.commands.connect(left.pid)
  await assert.rejects(again.wait(), (error) => error instanceof CommandExitError && error.exitCode === 5)
  const pty = await sbx.pty.create({ cols: 80, rows: 24, onData: () => {} })
  assert.equal(await sbx.pty.kill(pty.pid), true)
  await pty.wait().catch(() => {})
  const form = new FormData()
  form.append('file', new Blob(['by address']), 'x')
  assert.equal((await fetch(await sbx.uploadUrl('up'), { method: 'POST', body: form })).status, 200)
  await sbx.files.write('zipped', 'text '.repeat(1000), { gzip: true })
  assert.equal(await sbx.files.read('zipped', { gzip: true }), 'text '.repeat(1000))
  assert.equal(await sbx.files.read('up'), 'by address')
  const written = await sbx.files.write('labelled', 'x', { metadata: { Kind: 'draft' } })
  if (written.metadata) assert.deepEqual((await sbx.files.getInfo('labelled')).metadata, { kind: 'draft' })
  await sbx.git.configureUser('A Person', 'a@example.org')
  await sbx.git.init('repo')
  await sbx.files.write('repo/f', '1')
  await sbx.git.add('repo')
  await sbx.git.commit('repo', 'first')
  assert.equal((await sbx.git.status('repo')).isClean, true)
}

function fetched(host, path) {
  const where = new URL(process.env.E2B_SANDBOX_URL)
  return new Promise((done, failed) => {
    const request = http.get({ host: where.hostname, port: where.port, path, headers: { Host: host } }, async (answer) => {
      let text = ''
      for await (const piece of answer) text += piece
      done([answer.statusCode, text])
    })
    request.on('error', failed)
  })
}

async function ports(sbx) {
  const server = await sbx.commands.run('mkdir -p site; echo page > site/index.txt; cd site; exec python3 -m http.server 8000', { background: true })
  const [, text] = await until(async () => { const found = await fetched(sbx.getHost(8000), '/index.txt'); return found[0] === 200 && found })
  assert.equal(text, 'page\n')
  const [status, said] = await fetched(sbx.getHost(8001), '/')
  assert.equal(status, 502)
  assert.match(said, /port is not open/)
  await server.kill()
}

async function copies(sbx) {
  const name = `named-${Math.random().toString(36).slice(2, 10)}`
  const taken = await sbx.createSnapshot({ name })
  const fresh = await Sandbox.create(name, { timeoutMs: 120_000 })
  assert.equal(await fresh.files.read('a/b.txt'), 'text')
  await fresh.kill()
  assert.equal(await Sandbox.deleteSnapshot(taken.snapshotId), true)
  assert.equal(await Sandbox.deleteSnapshot(taken.snapshotId), false)
  for (const twin of await sbx.fork({ count: 2, timeoutMs: 120_000 })) {
    assert.ok(!(twin instanceof Error), String(twin))
    assert.equal(await twin.files.read('a/b.txt'), 'text')
    await twin.pause()
    const asleep = Sandbox.list({ query: { metadata: { mark: sbx.mark }, state: ['paused'] } })
    assert.deepEqual((await asleep.nextItems()).map((one) => one.sandboxId), [twin.sandboxId])
    await twin.kill()
  }
}

async function life(sbx) {
  const page = Sandbox.list({ query: { metadata: { mark: sbx.mark } } })
  assert.deepEqual((await page.nextItems()).map((one) => one.sandboxId), [sbx.sandboxId])
  assert.ok((await until(async () => { const m = await sbx.getMetrics(); return m.length && m }))[0].memUsed > 0)
  const snapshot = await sbx.createSnapshot()
  const twin = await Sandbox.create(snapshot.snapshotId, { timeoutMs: 120_000 })
  assert.equal(await twin.files.read('a/b.txt'), 'text')
  await twin.kill()
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true)
  await sbx.pause()
  assert.equal(await sbx.isRunning(), false)
  const again = await Sandbox.connect(sbx.sandboxId, { timeoutMs: 300_000 })
  assert.equal(await again.files.read('a/b.txt'), 'text')
  const handle = await sbx.commands.run('sleep 300', { background: true, timeoutMs: 0 })
  assert.equal(await sbx.kill(), true)
  await assert.rejects(handle.wait(), SandboxError)
  assert.equal(await sbx.kill(), false)
  await assert.rejects(Sandbox.connect(sbx.sandboxId), /not found/)
}

const mark = Math.random().toString(36)
const sbx = await Sandbox.create({ timeoutMs: 300_000, metadata: { mark }, envs: { FOO: '1' } })
sbx.mark = mark
try {
  for (const part of [commands, files, terminal, more, ports, copies, life]) await part(sbx)
} finally {
  await sbx.kill()
}

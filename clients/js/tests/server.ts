/** A real server for all tests: `sandkeep serve` in a home of its own, stopped and removed at the end. */

import { execFileSync, spawn } from 'node:child_process';
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync } from 'node:fs';
import { createServer, type Server } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type {} from 'vitest';
import type { TestProject } from 'vitest/node';

declare module 'vitest' {
  export interface ProvidedContext {
    url: string;
    key: string;
    /** Where a page is that may call the server from a browser. */
    page: string;
  }
}

const built = join(import.meta.dirname, '../dist');
const python = process.env['SANDKEEP_PYTHON'] ?? join(import.meta.dirname, '../../../.venv/bin/python');

export default async function setup(project: TestProject): Promise<() => Promise<void>> {
  if (!existsSync(python)) throw new Error(`no ${python}: run make setup, or set SANDKEEP_PYTHON`);
  const pages = await servePages();
  const page = `http://127.0.0.1:${(pages.address() as { port: number }).port}`;
  const home = mkdtempSync(join(tmpdir(), 'sk-js-'));
  const options = ['--port', '0', '--runtime', 'runc', '--sweep-interval', '0.2', '--cors-origin', page];
  const server = spawn(python, ['-m', 'sandkeep', 'serve', ...options], { env: { ...process.env, SANDKEEP_HOME: home, PYTHONUNBUFFERED: '1' } });
  let said = '';
  const ended = new Promise<void>((resolve) => server.once('exit', () => resolve()));
  await new Promise<void>((resolve, reject) => {
    const hear = (data: Buffer) => {
      said += data.toString();
      if (/serves on \S+\s/.test(said)) resolve();
    };
    server.stdout.on('data', hear);
    server.stderr.on('data', hear);
    server.once('exit', (code) => reject(new Error(`the server ended with ${code}: ${said}`)));
  });
  project.provide('page', page);
  project.provide('url', /serves on (\S+)/.exec(said)![1]!);
  project.provide('key', /shown once: (\S+)/.exec(said)![1]!);
  return async () => {
    pages.closeAllConnections();
    pages.close();
    server.kill('SIGKILL');
    await ended;
    for (const id of readdirSync(join(home, 'sandboxes'))) {
      execFileSync(python, ['-m', 'sandkeep', 'sandbox', 'kill', id], { env: { ...process.env, SANDKEEP_HOME: home } });
    }
    rmSync(home, { recursive: true, force: true });
  };
}

/** An empty page, and the built client beside it. */
async function servePages(): Promise<Server> {
  const server = createServer((request, answer) => {
    const name = /^\/((?:rest\/)?[a-z]+\.js)$/.exec(request.url ?? '')?.[1];
    if (name) answer.writeHead(200, { 'content-type': 'text/javascript' }).end(readFileSync(join(built, name)));
    else answer.writeHead(200, { 'content-type': 'text/html' }).end('<!doctype html><title>page</title>');
  });
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  return server;
}

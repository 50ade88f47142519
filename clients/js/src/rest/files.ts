/** Files of a sandbox; paths are resolved inside it. */

import { type Http, SandkeepError } from './http.js';
import type { FileInfo } from './nouns.js';

export class Files {
  constructor(
    private readonly http: Http,
    private readonly path: string,
  ) {}

  async read(path: string, range: { offset?: number; length?: number } = {}): Promise<Uint8Array> {
    return new Uint8Array(await (await this.http.raw('GET', this.path, {}, { path, ...range })).arrayBuffer());
  }

  async readText(path: string): Promise<string> {
    return new TextDecoder().decode(await this.read(path));
  }

  /** The content as it comes, for what is too large for memory. */
  async stream(path: string): Promise<ReadableStream<Uint8Array>> {
    return (await this.http.raw('GET', this.path, {}, { path })).body!;
  }

  /** Whole or not at all; missing folders are made. `mode` is octal, as in "755". */
  async write(path: string, data: string | Uint8Array<ArrayBuffer> | Blob, options: { mode?: string; append?: boolean; user?: string } = {}): Promise<FileInfo> {
    const init = { body: data, headers: { 'content-type': 'application/octet-stream' } };
    return (await (await this.http.raw('PUT', this.path, init, { path, ...options })).json()) as FileInfo;
  }

  async list(path: string, depth = 1): Promise<FileInfo[]> {
    return (await this.http.json<{ files: FileInfo[] }>('GET', `${this.path}/list`, undefined, { path, depth })).files;
  }

  stat(path: string): Promise<FileInfo> {
    return this.http.json('GET', `${this.path}/stat`, undefined, { path });
  }

  async exists(path: string): Promise<boolean> {
    try {
      await this.stat(path);
      return true;
    } catch (error) {
      if (error instanceof SandkeepError && error.code === 'FILE_NOT_FOUND') return false;
      throw error;
    }
  }

  mkdir(path: string): Promise<void> {
    return this.http.json('POST', `${this.path}/mkdir`, { path });
  }

  move(source: string, target: string): Promise<void> {
    return this.http.json('POST', `${this.path}/move`, { source, target });
  }

  remove(path: string, options: { recursive?: boolean } = {}): Promise<void> {
    return this.http.json('DELETE', this.path, undefined, { path, ...options });
  }
}

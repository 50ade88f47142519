/** A WebSocket wherever we are: the platform's own, or the package `ws` where there is none (Node 20). */

export interface Socket {
  send(data: string | Uint8Array): void;
  close(code?: number): void;
  binaryType: string;
  onopen: (() => void) | null;
  onmessage: ((message: { data: unknown }) => void) | null;
  onclose: ((close: { code: number; reason: string }) => void) | null;
  onerror: ((error: unknown) => void) | null;
}

type Maker = new (url: string, options?: unknown, more?: unknown) => Socket;

export async function openSocket(url: string, wsOptions?: Record<string, unknown>): Promise<Socket> {
  const native = (globalThis as { WebSocket?: Maker }).WebSocket;
  const make = native && !wsOptions ? () => new native(url) : await fromPackage(url, wsOptions);
  const socket = make();
  socket.binaryType = 'arraybuffer';
  return socket;
}

async function fromPackage(url: string, options?: Record<string, unknown>): Promise<() => Socket> {
  const name = 'ws'; // kept from bundlers, which have a WebSocket of their own
  let WebSocket: Maker;
  try {
    ({ WebSocket } = (await import(/* @vite-ignore */ name)) as { WebSocket: Maker });
  } catch (cause) {
    throw new Error('this platform has no WebSocket (or not one with options): npm install ws, or use Node 22', { cause });
  }
  return () => new WebSocket(url, options);
}

/** Joins a path and a query to a server's address, whose scheme may be http or ws. */
export function address(base: string, path: string, query: Record<string, string | number | undefined> = {}): string {
  const url = new URL(base);
  url.protocol = url.protocol.replace('http', 'ws');
  url.pathname = url.pathname.replace(/\/$/, '') + path;
  for (const [name, value] of Object.entries(query)) {
    if (value !== undefined) url.searchParams.set(name, String(value));
  }
  return url.toString();
}

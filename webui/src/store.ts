// What this browser keeps for the page: object stores, each in a database of its own, and short texts.

export class Store {
  private opening: Promise<IDBDatabase> | null = null;

  constructor(
    private readonly database: string,
    private readonly name: string,
    private readonly options?: IDBObjectStoreParameters,
  ) {}

  // Resolves when it is written: a full disk is told of at the end of a transaction.
  async asked<T>(mode: IDBTransactionMode, ask: (store: IDBObjectStore) => IDBRequest<T>): Promise<T> {
    const transaction = (await this.open()).transaction(this.name, mode);
    return new Promise((resolve, reject) => {
      const request = ask(transaction.objectStore(this.name));
      transaction.oncomplete = () => resolve(request.result);
      transaction.onabort = () => reject(transaction.error ?? request.error);
    });
  }

  private open(): Promise<IDBDatabase> {
    this.opening ??= new Promise((resolve, reject) => {
      const request = indexedDB.open(this.database, 1);
      request.onupgradeneeded = () => request.result.createObjectStore(this.name, this.options);
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => reject(request.error);
    });
    return this.opening;
  }
}

type Texts = "localStorage" | "sessionStorage";

// Without cookies the browser refuses these at the first touch, and a text may be too long for them.
export function keptText(where: Texts, name: string): string | null {
  try {
    return window[where].getItem(name);
  } catch {
    return null;
  }
}

export function keepText(where: Texts, name: string, text: string | null): void {
  try {
    if (text === null) window[where].removeItem(name);
    else window[where].setItem(name, text);
  } catch {
    // it holds until the page is left
  }
}

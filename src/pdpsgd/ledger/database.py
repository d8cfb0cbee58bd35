"""The database under a ledger: SQLite in a file, or PostgreSQL by URL; every write holds one lock."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import Connection, Engine, create_engine, event, inspect, select
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.pool import NullPool

from pdpsgd._typing import IdArray
from pdpsgd.errors import PdpsgdError, fail, shown
from pdpsgd.ledger import schema

TIMEOUT = 60.0
"""Seconds to wait for another process that is writing."""
WRITES = "ledger_writes"
PART = 8_192
"""Rows that are read together."""


class LedgerUnavailable(PdpsgdError):
    """A database that cannot be read or written now: locked, full, or out of reach. Nothing is half-done."""

    may_be_written = False
    """Whether the last write may have gone through: the connection was lost while it was committed."""


class Database:
    """Connections to one ledger's database, a new one for every transaction, so that processes may fork.

    Args:
        place: the path of a file, or a URL.
        timeout: seconds to wait for another process.
        find_damage: says what is wrong with the tables, or None; asked where using them has failed.
    """

    def __init__(
        self,
        place: str | os.PathLike[str],
        *,
        timeout: float = TIMEOUT,
        find_damage: Callable[[Connection], str | None],
    ) -> None:
        self.url = _url(place)
        self._find_damage = find_damage
        self.timeout = timeout
        self.is_file = self.url.startswith("sqlite")
        self.engine = _engine(self.url, timeout)

    @property
    def name(self) -> str:
        """The place without a password: a path, or a URL."""
        if self.is_file:
            return os.path.relpath(str(make_url(self.url).database))
        return make_url(self.url).render_as_string(hide_password=True)

    def create(self, fill: Callable[[Connection], None]) -> None:
        """Create the tables and fill them, in one transaction; a file is one that only its owner may read."""
        if not self.is_file:
            with self._explained("nothing was written"), self.engine.begin() as connection:
                _keep_what_is_committed(connection)
                if inspect(connection).has_table("ledger"):
                    fail(f"Expected a database without a ledger. {self.name} has one already.")
                schema.metadata.create_all(connection)
                fill(connection)
            return
        path = Path(str(make_url(self.url).database))
        if path.exists():
            fail(f"Expected a new file for the ledger. {path} is there already.")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except OSError as error:
            fail(f"Expected a place for the ledger. {path} cannot be written: {error.strerror}.")
        try:
            with self._explained("nothing was written"):
                with closing(sqlite3.connect(path)) as plain:
                    plain.execute("PRAGMA journal_mode=WAL")
                with self.engine.begin() as connection:
                    schema.metadata.create_all(connection)
                    fill(connection)
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def remove(self) -> None:
        """Remove the file of a ledger, with SQLite's own files beside it."""
        self.engine.dispose()
        for ending in ("", "-wal", "-shm"):
            Path(f"{make_url(self.url).database}{ending}").unlink(missing_ok=True)

    def check_version(self) -> None:
        """Refuse what is no ledger, or one of another version."""
        if self.is_file and not Path(str(make_url(self.url).database)).exists():
            fail(
                f"Expected a ledger at {make_url(self.url).database}. There is none: make one with pdpsgd ledger init."
            )
        with self._explained("nothing was read"):
            if not inspect(self.engine).has_table("ledger"):
                fail(
                    f"Expected a ledger at {self.name}. The database has none: make one with pdpsgd ledger init."
                )
            with self.reading() as connection:
                version = connection.execute(select(schema.ledger.c.schema_version)).scalar()
        if version != schema.SCHEMA_VERSION:
            fail(
                f"Expected a ledger of version {schema.SCHEMA_VERSION}. {self.name} has version {shown(version)}: "
                "use the release of pdpsgd that wrote it."
            )

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Give a connection that sees one state of the ledger."""
        with self._explained("nothing was written"), self.engine.connect() as connection:
            if not self.is_file:
                connection = connection.execution_options(isolation_level="REPEATABLE READ")
            with connection.begin():
                yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """Give a connection that holds the lock on the ledger, and commit at the end; an error undoes everything."""
        with self._explained("nothing was written"), self.engine.connect() as connection:
            connection = connection.execution_options(**{WRITES: True})
            transaction = connection.begin()
            try:
                if not self.is_file:
                    _keep_what_is_committed(connection)
                    connection.execute(select(schema.ledger.c.id).with_for_update()).all()
                yield connection
            except BaseException:
                transaction.rollback()
                raise
            try:
                with self._explained(
                    "whether it was written is not known: look at pdpsgd ledger runs before going on"
                ):
                    transaction.commit()
            except LedgerUnavailable as error:
                error.may_be_written = True
                raise

    @contextmanager
    def _explained(self, outcome: str) -> Iterator[None]:
        """Turn errors of the database into one sentence; all driver errors of bulk reads and writes as well."""
        try:
            yield
        except PdpsgdError:
            raise
        except DBAPIError as error:
            raise LedgerUnavailable(self._sentence(error.orig or error, outcome)) from error
        except Exception as error:
            if type(error).__module__.partition(".")[0] in ("sqlite3", "psycopg", "sqlalchemy"):
                raise LedgerUnavailable(self._sentence(error, outcome)) from error
            damage = self._damage()
            if damage is None:
                raise
            raise LedgerUnavailable(
                f"The ledger at {self.name} was damaged or edited; {outcome}. {damage}. Put back a copy, or see what "
                "pdpsgd ledger check finds."
            ) from error

    def _damage(self) -> str | None:
        """Look for damage, in a transaction of its own."""
        try:
            with self.engine.connect() as connection, connection.begin():
                return self._find_damage(connection)
        except Exception as error:  # not even a transaction can begin
            return f"It cannot be read ({type(error).__name__}: {shown(str(error))})"

    def _sentence(self, error: BaseException, outcome: str) -> str:
        text = " ".join(str(error).split())
        if "locked" in text or "busy" in text:
            reason = f"another process has been writing to it for {self.timeout:g} seconds"
        elif "disk is full" in text or "No space left" in text:
            reason = "the disk is full"
        elif "readonly" in text or "unable to open" in text:
            reason = f"its file cannot be written ({text})"
        elif "connection" in text or "terminat" in text:
            reason = f"the connection to the database was lost ({text})"
        else:
            reason = text
        return f"The ledger at {self.name} cannot be used: {reason}; {outcome}."


def _keep_what_is_committed(connection: Connection) -> None:
    """Have PostgreSQL write a commit to disk before it says that it is done, however it is set up.

    A charge that a crash of the server takes back after its run has released something is a run that nobody counts.
    """
    asked = "SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'"
    connection.exec_driver_sql(asked)


def insert(connection: Connection, table: Any, rows: Iterable[tuple[Any, ...]]) -> None:
    """Insert many rows, in the order of the table's columns, by the fastest way that the driver has."""
    names = [column.name for column in table.columns]
    if connection.dialect.name == "sqlite":
        marks = ", ".join("?" * len(names))
        plain: Any = connection.connection.driver_connection
        plain.executemany(f"INSERT INTO {table.name} ({', '.join(names)}) VALUES ({marks})", rows)
        return
    driver: Any = connection.connection.driver_connection
    with driver.cursor() as cursor, cursor.copy(f"COPY {table.name} ({', '.join(names)}) FROM STDIN") as copy:
        for row in rows:
            copy.write_row(row)


def columns(connection: Connection, query: Any, kinds: Sequence[Any]) -> list[IdArray]:
    """Read a query's columns as arrays of these kinds, in parts, so that a million rows need little memory."""
    parts: list[list[IdArray]] = [[] for _ in kinds]
    # The driver's own cursor: rows of SQLAlchemy take several times as long, and there are millions.
    text = str(query.compile(connection.engine, compile_kwargs={"literal_binds": True}))
    driver: Any = connection.connection
    with closing(driver.cursor()) as cursor:
        cursor.execute(text)
        while rows := cursor.fetchmany(PART):
            for column, kind, values in zip(parts, kinds, zip(*rows, strict=True), strict=True):
                column.append(_array(values, kind))
    return [
        np.concatenate(column) if column else np.zeros(0, dtype=kind)
        for column, kind in zip(parts, kinds, strict=True)
    ]


def _array(values: tuple[Any, ...], kind: Any) -> IdArray:
    """Make an array of values that are of this kind already: nothing is converted, since nothing was written so."""
    array, wanted = np.array(values), np.dtype(kind).kind
    if array.dtype.kind not in {"f": "fi", "i": "i", "U": "U"}[wanted]:
        raise TypeError(f"Expected values of {np.dtype(kind)} in a column of the ledger. Got {array.dtype}.")
    return array.astype(kind, copy=False)


def _url(place: str | os.PathLike[str]) -> str:
    text = os.fspath(place)
    if text.startswith(("postgresql://", "postgres://")):
        return f"postgresql+psycopg://{text.partition('://')[2]}"
    if "://" in text:
        return text
    return f"sqlite:///{Path(text).absolute()}"


def _engine(url: str, timeout: float) -> Engine:
    try:
        if url.startswith("sqlite"):
            engine = create_engine(url, poolclass=NullPool, connect_args={"timeout": timeout})
            _set_up_sqlite(engine)
            return engine
        if not url.startswith("postgresql"):
            fail(
                f"Expected a file for SQLite, or a URL postgresql://... Got {make_url(url).render_as_string()!r}."
            )
        options = f"-c lock_timeout={int(timeout * 1000)}"
        return create_engine(
            url, poolclass=NullPool, connect_args={"connect_timeout": 10, "options": options}
        )
    except (ArgumentError, NoSuchModuleError) as error:
        fail(f"Expected a file for SQLite, or a URL postgresql://... Got one that cannot be read: {error}.")
    except ModuleNotFoundError as error:
        fail(f"PostgreSQL needs a package that is not there ({error}): pip install 'pdpsgd[postgresql]'.")


def _set_up_sqlite(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def _connected(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # transactions begin where we say so, not where the driver does
        connection.execute("PRAGMA synchronous=FULL")

    @event.listens_for(engine, "begin")
    def _begun(connection: Connection) -> None:
        writes = connection.get_execution_options().get(WRITES)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

from types import ModuleType

from ups_store.errors import AccessError as AccessError
from ups_store.errors import ArrayNotFoundError as ArrayNotFoundError
from ups_store.errors import BatchTimeoutError as BatchTimeoutError
from ups_store.errors import BuildInterruptedError as BuildInterruptedError
from ups_store.errors import BuildLockedError as BuildLockedError
from ups_store.errors import CommitError as CommitError
from ups_store.errors import ConfigError as ConfigError
from ups_store.errors import CorruptChunkError as CorruptChunkError
from ups_store.errors import DeviceError as DeviceError
from ups_store.errors import DiskFullError as DiskFullError
from ups_store.errors import FormatError as FormatError
from ups_store.errors import IdentityMismatchError as IdentityMismatchError
from ups_store.errors import MemoryLimitError as MemoryLimitError
from ups_store.errors import MissingExtraError as MissingExtraError
from ups_store.errors import NotCommittedError as NotCommittedError
from ups_store.errors import ReadError as ReadError
from ups_store.errors import ReadTimeoutError as ReadTimeoutError
from ups_store.errors import RemoteError as RemoteError
from ups_store.errors import SampleIndexError as SampleIndexError
from ups_store.errors import SourceError as SourceError
from ups_store.errors import SpecError as SpecError
from ups_store.errors import StoreClosedError as StoreClosedError
from ups_store.errors import StoreError as StoreError
from ups_store.errors import StoreNotFoundError as StoreNotFoundError
from ups_store.errors import StoreReplacedError as StoreReplacedError
from ups_store.errors import TruncatedError as TruncatedError
from ups_store.errors import VersionTooNewError as VersionTooNewError
from ups_store.format.metadata import ArraySpec as ArraySpec
from ups_store.format.root import FORMAT_VERSION as FORMAT_VERSION
from ups_store.format.root import describe_differences as describe_differences
from ups_store.format.root import differences as differences
from ups_store.packed.store import PackedStore as PackedStore
from ups_store.read.base import AnyStore as AnyStore
from ups_store.read.items import Window as Window
from ups_store.read.loader import make_loader as make_loader
from ups_store.read.open import open_any
from ups_store.read.preload import forecast_preload as forecast_preload
from ups_store.read.ragged import RaggedArray as RaggedArray
from ups_store.read.several import PartitionedStore as PartitionedStore
from ups_store.read.store import Store as Store
from ups_store.remote.store import RemoteStore as RemoteStore
from ups_store.system.memory import available_bytes
from ups_store.system.memory import num_cores as num_cores
from ups_store.writing.append import append as append
from ups_store.writing.create import create as create
from ups_store.writing.create import join as join
from ups_store.writing.write import cached as cached
from ups_store.writing.write import load as load
from ups_store.writing.write import save as save
from ups_store.writing.write import write as write
from ups_store.writing.writer import BatchedCommits as BatchedCommits
from ups_store.writing.writer import Committer as Committer
from ups_store.writing.writer import StoreWriter as StoreWriter

available_memory_bytes = available_bytes
open = open_any

__version__: str

def module_above(name: str) -> ModuleType: ...

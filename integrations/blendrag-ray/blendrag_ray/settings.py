"""What a cluster serves: the arguments of the application in a Serve config file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, ValidationError

from blendrag import config
from blendrag.config import Settings, settings
from blendrag.corpus.corpus import Corpus
from blendrag.corpus.recorded_model import given_model, model_for, recorded_model
from blendrag.errors import InvalidInputError, InvalidOptionError
from blendrag.frameworks.fields import DefaultFields, NamedEngineFields
from blendrag.option import refuse_unknown
from blendrag.server.access import ApiKeys, checked_hosts
from blendrag.server.cross_origin import checked_origins
from blendrag.store import regular_files
from blendrag_ray import following
from blendrag_ray.nodes import check_model
from blendrag_ray.routing import QUEUED_SHARE

if TYPE_CHECKING:
    from blendrag.engine import BlendEngine


class ServedCluster(NamedEngineFields, DefaultFields):
    """Paths are those of the nodes. Where a field is ``None``, ``BLENDRAG_*`` variables of the nodes or the
    store decide. With ``remote``, the store is of each node, else one that all nodes share."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    model: config.Model | None = None
    store: str | None = None
    top_k: config.TopK | None = None
    search: config.Search | None = None
    reranker: config.Reranker | None = None
    schemas: tuple[str, ...] = ()
    """Files of prompt schemas."""
    api_key_file: str | None = None
    """On each node. ``api_keys`` is the text of one."""
    api_keys: str | None = Field(default=None, repr=False)
    allow_hosts: Annotated[tuple[str, ...], AfterValidator(checked_hosts)] = ()
    """Further names of the cluster for requests without a key."""
    cors_origins: Annotated[tuple[str, ...], AfterValidator(checked_origins)] = ()
    """Sites whose pages may ask."""
    max_requests: config.MaxRequests | None = None
    max_body_bytes: config.MaxBodyBytes | None = None
    max_tokens: config.MaxTokens | None = None

    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(default=1, ge=1)
    target_requests: float = Field(default=8.0, gt=0)
    """Waiting and running requests per replica that autoscaling aims at."""
    queued_share: float = Field(default=QUEUED_SHARE, ge=0)
    """What a request that waits on a replica costs the next one, as a share of the KV that it loads. A lower
    price reads less from the remote, and lets requests wait longer."""
    cpus_per_replica: float = Field(default=1.0, ge=0)
    """Also the threads of its torch, unless ``OMP_NUM_THREADS`` is set."""
    gpus_per_replica: float = Field(default=0.0, ge=0)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> ServedCluster:
        """Raises :class:`InvalidInputError` for arguments of other names or types."""
        refuse_unknown(arguments, cls.model_fields, "an argument of the application")
        try:
            served = cls.model_validate(arguments)
        except ValidationError as exc:
            first = exc.errors()[0]
            if first["type"] == "option":
                raise InvalidOptionError(**first["ctx"]) from exc
            name = ".".join(map(str, first["loc"]))
            raise InvalidInputError(f"argument {name} of the application: {first['msg']}") from exc
        if served.max_replicas < served.min_replicas:
            raise InvalidInputError(
                f"min_replicas {served.min_replicas} with max_replicas {served.max_replicas}, expected at "
                "least as many"
            )
        return served

    def engine(self, is_ingress: bool = False) -> BlendEngine:
        """The engine of a replica with its schemas, over a corpus that follows the published one if it may.

        The ingress opens only its corpus and its tokenizer, which need no weights.
        """
        from blendrag.engine import BlendEngine

        follows = following.follow_once(self.store_path, self._settings)
        given = self.model_dump(include=_ENGINE_OPTIONS, exclude_none=True)
        read_only = is_ingress and not follows
        engine = BlendEngine(self.model, self.store_path, read_only=read_only, **given)
        for file in self.schemas:
            engine.add_schema(Path(file))
        if follows:
            following.keep_following(engine)
        return engine

    @property
    def _settings(self) -> Settings:
        """Settings of this node, with the remote that was named."""
        return replace(settings(), remote=self.remote or settings().remote)

    def documents(self) -> tuple[int, str]:
        """Chunks of the corpus that this node serves, and their tokenizer; also looks for the model's files
        and schemas. Copies nothing from a remote.

        Raises :class:`BlendragError`, also for a published corpus that cannot be read.
        """
        published = following.published(self.store_path, self._settings)
        if published is None:
            model = model_for(self.model, self.store_path, bool(self.trust_remote_code))
        else:
            given = given_model(self.model, bool(self.trust_remote_code))
            model = given or recorded_model(published.settings.model, self.store_path)
        check_model(model)
        for file in self.schemas:
            if not Path(file).exists():
                raise InvalidInputError(
                    f"there is no schema {file}; expected the same path on every node: copy it there, or "
                    "share its directory"
                )
        if published is not None:
            return published.chunks, published.settings.tokenizer_fingerprint
        with Corpus.open(self.store_path, read_only=True) as corpus:
            manifest = corpus.manifest_or_none
            return len(corpus), manifest.tokenizer_fingerprint if manifest else ""

    def keys(self) -> ApiKeys:
        """Who may ask. Raises :class:`InvalidInputError`."""
        if self.api_keys is not None:
            return ApiKeys.parse(self.api_keys, "api_keys")
        if self.api_key_file is None:
            return ApiKeys()
        try:
            text = regular_files.read_text(Path(self.api_key_file), regular_files.MIB, follow=True)
        except (OSError, UnicodeDecodeError) as exc:
            raise InvalidInputError(
                f"api_key_file {self.api_key_file} cannot be read ({exc}); mount it on every node"
            ) from exc
        return ApiKeys.parse(text, f"api_key_file {self.api_key_file}")

    @property
    def store_path(self) -> Path:
        return Path(self.store or settings().store)

    @property
    def limits(self) -> dict[str, int]:
        """Fields of :class:`blendrag.server.access.Limits`."""
        return self.model_dump(include=_LIMITS, exclude_none=True)


#: What the engine of a replica is made with, besides model and store.
_ENGINE_OPTIONS = set(config.ConstructorOptions.__annotations__)
_LIMITS = {"max_requests", "max_body_bytes", "max_tokens"}

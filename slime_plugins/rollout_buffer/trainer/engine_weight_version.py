"""Reads the weight version of the engines, which is the trainer's newest version at the start of a rollout."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import aiohttp

from slime_plugins.rollout_buffer.credentials import key_headers
from slime_plugins.rollout_buffer.errors import network_reason
from slime_plugins.rollout_buffer.types import version_number

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0


async def weight_version_of(engine_url: str | None) -> int | None:
    """Returns the newest weight version of an engine, or of the engines behind a router.

    Each request may take ``TIMEOUT_S``. Returns None if no engine reports a number, or after an error:
    the rollout can continue, because replies of the engines name their version as well.
    """
    if not engine_url:
        return None
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session:
            return await _newest(session, engine_url.rstrip("/"))
    except Exception as error:  # noqa: BLE001 - the version is optional
        is_network = isinstance(error, aiohttp.ClientError | OSError)
        logger.info("no weight version of %s: %s", engine_url, network_reason(error) if is_network else repr(error))
        return None


async def _newest(session: aiohttp.ClientSession, url: str) -> int | None:
    version = await _version(session, url)
    if version is not None:
        return version
    workers = await _workers(session, url)
    versions = await asyncio.gather(*(_version(session, worker) for worker in workers), return_exceptions=True)
    return max((version for version in versions if isinstance(version, int)), default=None)


async def _workers(session: aiohttp.ClientSession, router_url: str) -> list[str]:
    """Returns the engines behind a router; older routers have another route."""
    listed = await _get(session, f"{router_url}/workers")
    urls = [worker.get("url") for worker in listed.get("workers") or () if isinstance(worker, dict)]
    if not urls:
        urls = (await _get(session, f"{router_url}/list_workers")).get("urls") or []
    return [url.rstrip("/") for url in urls if isinstance(url, str)]


async def _version(session: aiohttp.ClientSession, engine_url: str) -> int | None:
    return version_number(str((await _get(session, f"{engine_url}/model_info")).get("weight_version")))


async def _get(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(url, headers=key_headers(url)) as response:
        body = await response.json(content_type=None) if response.status == 200 else {}
    return body if isinstance(body, dict) else {}

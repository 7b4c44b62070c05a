# SPDX-License-Identifier: Apache-2.0
"""The table of devices that a plan is made for. No torch."""

from dataclasses import dataclass
from pathlib import Path

from puzzle.config import DeviceConfig, read_yaml, validate
from puzzle.errors import ConfigError, did_you_mean

SHIPPED = Path(__file__).parent / "devices.yaml"
DEFAULT = "H100-SXM"


@dataclass(frozen=True)
class Device:
    """One device; `devices.yaml` says what the figures mean."""

    name: str
    kind: str
    flops: dict[str, float]
    bandwidth: float
    memory: float
    compute_efficiency: float
    memory_efficiency: float
    call_us: float
    source: str

    def peak(self, dtype: str) -> float:
        """FLOP/s; a dtype the hardware does not compute in is computed in float32."""
        return self.flops.get(dtype, self.flops["float32"])

    @property
    def compute_dtype(self) -> str:
        """What `compute_dtype: auto` means here."""
        return "bfloat16" if "bfloat16" in self.flops else "float32"


def table(own: Path | None = None) -> dict[str, Device]:
    """The shipped devices, and those of the user's file, which win where names are the same.

    Raises:
        ConfigError: the file or an entry is wrong.
    """
    found = {}
    for file in (SHIPPED, own):
        for name, entry in read_yaml(file).items() if file else ():
            if not isinstance(entry, dict):
                raise ConfigError(f"{file}, {name}: a mapping of keys to values is expected")
            found[str(name)] = Device(str(name), **validate(DeviceConfig, entry, f"{file}, {name}").model_dump())
    return found


def named(name: str, own: Path | None = None) -> Device:
    """A device of the table.

    Raises:
        ConfigError: there is no such device, or the user's file is wrong.
    """
    devices = table(own)
    if name not in devices:
        raise ConfigError(f"device {name!r} is not known{did_you_mean(name, devices)} (known: {', '.join(devices)})")
    return devices[name]

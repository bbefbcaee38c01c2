"""The page of a fabric: ports that face cards, ports in all, switches of each tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from comm.report.layout import Line, table, title


def fabric_page(fabrics: Sequence[Mapping[str, Any]], width: int) -> list[Line]:
    """fabrics: what moe.jobs.fabric puts together; `refused` says why there is none."""
    rows = []
    for one in fabrics:
        head = (f"{one['nic_Gbps']:g}", str(one["tiers"]))
        if one["refused"]:
            rows.append((*head, "-", "-", "-", "-", one["refused"]))
            continue
        figures = (one["card_ports"], one["ports"], one["installed_ports"])
        ratio = f"{one['ports'] / one['card_ports']:.2f} x"
        switches = " + ".join(f"{number:,}" for number in one["switches"])
        rows.append((*head, *(f"{number:,}" for number in figures), ratio, switches))
    words = max(len(row[-1]) for row in rows)
    rows = [(*row[:-1], row[-1].ljust(words)) for row in rows]
    header = ("NIC Gb/s", "tiers", "to cards", "ports", "installed", "ports / card port")
    remark = "ports with a cable; installed counts all of the switches"
    return title("PORTS", remark, width) + table((*header, "switches".ljust(words)), rows)

"""All points of a suite: plan, skip what is done, launch, watch, finish, take up again.

A campaign keeps no state of its own: what is done, and who does the rest, stands in the store, so running the same command again fills
the holes and goes on with jobs that still run.
"""

from caraml.campaign.attempt import Watcher
from caraml.campaign.campaign import Campaign, Options, exit_code
from caraml.campaign.machine import machine_of

__all__ = ["Campaign", "Options", "Watcher", "exit_code", "machine_of"]

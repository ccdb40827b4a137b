"""The hub, token and rig of the transfer tests."""

from tests.transfer.conftest import hub as hub
from tests.transfer.conftest import rig as rig
from tests.transfer.conftest import token_file as token_file

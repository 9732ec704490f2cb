# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""The version, readable without importing torch."""

__version__ = "0.1.0.dev0"

# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Random sequences of events in a training loop, each step held against a native twin as bits."""

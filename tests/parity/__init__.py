# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Whole fits on the CPU: native and replayed, equal to the last bit, with the action that each step must take."""

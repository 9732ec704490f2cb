# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Bit comparison, traced fits and models that every tier of the tests shares."""

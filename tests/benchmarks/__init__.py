# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Benchmarks: each writes a receipt; every published figure is rendered from one."""

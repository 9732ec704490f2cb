# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""A real package, so that another distribution's top-level ``tests`` never shadows it."""

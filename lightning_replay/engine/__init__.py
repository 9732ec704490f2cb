# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The lightning_replay developers
"""Record what a callable launches and launch it again. Knows torch and nothing else of this package but its reasons."""

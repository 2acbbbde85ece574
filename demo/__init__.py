"""The bundled demo model: task generation, training, distillation and evaluation."""

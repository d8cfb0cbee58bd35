"""An ordinary loop with Opacus: everybody gets the same epsilon, that of the strictest person."""

import torch
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

images, labels = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(images / 8 - 1, dtype=torch.float32), torch.tensor(labels))
train, test = torch.utils.data.random_split(dataset, [1437, 360], generator=torch.Generator().manual_seed(0))

model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
loader = DataLoader(train, batch_size=256)
criterion = nn.CrossEntropyLoss()

engine = PrivacyEngine()
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=optimizer,
    data_loader=loader,
    target_epsilon=1.0,
    target_delta=1e-5,
    epochs=25,
    max_grad_norm=1.0,
)

for _epoch in range(25):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()

with torch.no_grad():
    inputs, targets = (torch.stack(part) for part in zip(*test, strict=True))
    accuracy = float((model(inputs).argmax(1) == targets).float().mean())
print(f"Opacus: accuracy {accuracy:.1%}, epsilon {engine.get_epsilon(1e-5):.2f} for everybody")

"""The same loop with pdpsgd: each person gets the epsilon that they asked for."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pdpsgd import Budgets, PrivacyEngine, plan

images, labels = load_digits(return_X_y=True)
dataset = TensorDataset(torch.tensor(images / 8 - 1, dtype=torch.float32), torch.tensor(labels))
train, test = torch.utils.data.random_split(dataset, [1437, 360], generator=torch.Generator().manual_seed(0))

model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
loader = DataLoader(train, batch_size=256)
criterion = nn.CrossEntropyLoss()

budgets = Budgets.from_tiers(
    {1: 0.34, 2: 0.43, 3: 0.23}, people=1437, shuffle=0
)  # or your own list of people
made = plan(budgets, steps=150, batch_size=256)

engine = PrivacyEngine()
model, optimizer, loader = engine.make_private(
    module=model, optimizer=optimizer, data_loader=loader, plan=made, budgets=budgets, criterion=criterion
)

for inputs, targets in loader:  # exactly the plan's steps
    optimizer.zero_grad()
    loss = criterion(model(inputs), targets)
    loss.backward()
    optimizer.step()

with torch.no_grad():
    inputs, targets = (torch.stack(part) for part in zip(*test, strict=True))
    accuracy = float((model(inputs).argmax(1) == targets).float().mean())
spent = ", ".join(f"{level.proven_epsilon:.2f} of {level.epsilon:g}" for level in made.levels)
print(f"pdpsgd: accuracy {accuracy:.1%}, epsilon {spent}")

package shop

import (
	"errors"
	"testing"

	"github.com/redismutex/redismutex"
	"github.com/redismutex/redismutex/redismutextest"
)

func TestTheLastPieceIsSoldOnce(t *testing.T) {
	rd := redismutextest.New(t)
	shop := New(rd.Client())
	rd.Client().Set(t.Context(), "left:bicycle", 1, 0)

	if err := shop.Sell(t.Context(), "bicycle"); err != nil {
		t.Error(err)
	}
	if err := shop.Sell(t.Context(), "bicycle"); !errors.Is(err, ErrSoldOut) {
		t.Errorf("want ErrSoldOut, got %v", err)
	}
}

func TestACustomerWaitsForAnother(t *testing.T) {
	rd := redismutextest.New(t)
	shop := New(rd.Client())
	rd.Client().Set(t.Context(), "left:bicycle", 1, 0)

	release := rd.HoldByOther("stock:bicycle")
	sold := make(chan error)
	go func() { sold <- shop.Sell(t.Context(), "bicycle") }()
	rd.AwaitWaiters(t, "stock:bicycle", 1)
	release()
	if err := <-sold; err != nil {
		t.Error(err)
	}
}

func TestNothingIsSoldWithoutTheLock(t *testing.T) {
	rd := redismutextest.New(t)
	err := New(rd.Client()).take(t.Context(), "bicycle")
	if !errors.Is(err, redismutex.ErrNotHeld) {
		t.Errorf("want ErrNotHeld, got %v", err)
	}
}
